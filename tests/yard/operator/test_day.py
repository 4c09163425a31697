"""An operator's day on one yard: what happens, and what must be seen of it.

Registered, run by a schedule, paused, resumed; runs by REST, by the form in a browser, by both
command lines; one cancelled; then worker, flow, stage and server are killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.server.home import PASSWORD, URL
from tests import browser
from tests.ports import free_port
from tests.security.attacks import Target
from tests.yard.faults.faults import plan, steps, training
from tests.yard.operator.browser import GENERATIONS, Form, browser_page
from tests.yard.operator.deployed import ENDED, WholeServer, comes, pids, register, working
from tests.yard.operator.scheduled import ARRIVALS, ONE_AT_A_TIME, every, first_of
from tests.yard.yard import Yard, write_corpus

pytestmark = [pytest.mark.yard, pytest.mark.full, pytest.mark.timeout(1800)]

ITERS = 1500
LONG = 100_000
START_SECONDS = 180
END_SECONDS = 300
DEPLOYMENTS = 'deployments = ["corpus-refresh", "run-stage"]\nblock = "process"\n'
SECRET = "admin:of-the-day"
WORKER = ["flows.worker"]


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Settings of a server whose database is of a kind."""
    if request.param == "sqlite":
        yield {}
        return
    programs = next(iter(Path("/usr/lib/postgresql").glob("*/bin")), None)
    if programs is None or os.geteuid():
        pytest.skip("no PostgreSQL of Debian's packages, or not root, who can start it")
    port, home = free_port(), Path(tempfile.mkdtemp(prefix="trainyard-day-"))
    shutil.chown(home, "postgres", "postgres")
    initdb = [programs / "initdb", "--auth=trust", "--username=prefect", "-D", home / "data"]
    subprocess.run(initdb, user="postgres", cwd=home, check=True, stdout=subprocess.DEVNULL)
    local = ["-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={home}"]
    server = [programs / "postgres", "-D", home / "data", "-p", str(port), *local]
    with subprocess.Popen(server, user="postgres", cwd=home, stderr=subprocess.DEVNULL) as running:
        try:
            url = f"postgresql+asyncpg://prefect@127.0.0.1:{port}/postgres"
            yield {"PREFECT_API_DATABASE_CONNECTION_URL": url}
        finally:
            running.send_signal(signal.SIGQUIT)
            running.wait()
            shutil.rmtree(home)


class Day:
    """The yard, its server, and what the operator does."""

    def __init__(self, folder: Path, server: WholeServer) -> None:
        self.folder, self.server = folder, server
        client = {"TRAINYARD_CACHE": str(folder / "cache"), PASSWORD: SECRET}
        self.yard = Yard(folder, {**server.environment, URL: server.url, **client})
        (folder / "arrivals").mkdir()
        write_corpus(folder / "arrivals" / "a.jsonl", 20, seed=1)
        self.recipe = self.yard.recipe(ARRIVALS.format(folder=folder))
        profile = folder / "site.toml"
        schedule = every(30, recipe=self.recipe, yard=str(folder / "yard"))
        profile.write_text(DEPLOYMENTS + ONE_AT_A_TIME + schedule)
        register(self.yard, str(profile))

    def runs(self, deployment: str) -> list[dict[str, Any]]:
        """All runs of FLOW/YARD, the oldest first."""
        there = self.server.ask(f"deployments/name/{deployment}")["id"]
        asked = {"deployments": {"id": {"any_": [there]}}, "sort": "EXPECTED_START_TIME_ASC"}
        return list(self.server.ask("flow_runs/filter", asked))

    def prefect(self, *words: str) -> str:
        """What Prefect's command line prints."""
        done = self.yard.run("-m", "prefect", *words)
        assert done.status == 0, done.out + done.err
        return done.out

    def switch(self, verb: str) -> None:
        """Pause or resume the schedule."""
        (schedule,) = self.server.ask("deployments/name/corpus-refresh/site")["schedules"]
        self.prefect("deployment", "schedule", verb, "corpus-refresh/site", schedule["id"])

    def rests(self, deployment: str) -> None:
        """All of its runs have ended."""

        def others() -> list[str]:
            kinds = [one["state_type"] for one in self.runs(deployment)]
            return [kind for kind in kinds if kind not in ENDED]

        assert comes(END_SECONDS, lambda: not others()), others()

    def ends(self, run: str, kind: str = "COMPLETED") -> None:
        assert comes(END_SECONDS, lambda: self.server.state(run) in ENDED), self.log(run)
        assert self.server.state(run) == kind, self.log(run)

    def log(self, run: str) -> str:
        """What the pages have of a run's log."""
        return "\n".join(line["message"] for line in self.server.of_run("logs", run))

    def history(self, run: str) -> list[str]:
        """The names of all states that a run was in."""
        found = self.server.ask(f"flow_run_states/?flow_run_id={run}")
        return [one["name"] for one in sorted(found, key=lambda one: str(one["timestamp"]))]

    def train(self, name: str, iters: int = ITERS) -> tuple[str, Path]:
        """A run that trains and has saved a step, and its folder."""
        folder = self.folder / name
        document = training(folder, str(folder / "save"), iters, save_interval=100)
        run = self.server.begin("run-stage/site", stage="pretrain", config=document)
        assert comes(START_SECONDS, lambda: steps(folder / "save")), self.log(run)
        return run, folder / "save"

    def check_once(self, run: str, save: Path) -> None:
        """It completes; every step was trained once, and its log is on the pages."""
        self.ends(run)
        made = [json.loads(line).get("step") for line in (save / "ledger.jsonl").open()]
        assert [step for step in made if step] == list(range(1, ITERS + 1))
        assert steps(save)[-1] == ITERS
        assert comes(30, lambda: "saved checkpoint" in self.log(run)), self.log(run)


@pytest.fixture
def day(tmp_path: Path, database: dict[str, str]) -> Iterator[Day]:
    pages = {
        "PREFECT_UI_ENABLED": "true",
        "PREFECT_UI_API_URL": "/api",
        "PREFECT_UI_STATIC_DIRECTORY": str(tmp_path / "pages"),
    }
    server = WholeServer(tmp_path, SECRET, **pages, **database)
    try:
        server.wait()
        yield Day(tmp_path, server)
    finally:
        server.stop()


def test_an_operators_day(day: Day) -> None:
    with working(day.yard, "site", "morning", program=WORKER) as worker:
        by_a_schedule(day)
        by_every_way(day)
        without_a_password(day)
        cancelled(day)
        run, save = day.train("worker")
        (pid,) = pids("-m flows.worker.prefect_worker --pool site --name morning")
        os.kill(pid, signal.SIGKILL)
        worker.process.wait()
        day.check_once(run, save)
    with working(day.yard, "site", "afternoon", program=WORKER):
        after_its_flow_is_killed(day)
        after_its_stage_is_killed(day)
        after_the_server_is_killed(day)
    assert day.yard.wait_until_empty(30) == []


def by_a_schedule(day: Day) -> None:
    """It runs by itself, not while it is paused, and then with the same parameters."""
    name = "corpus-refresh/site"
    first = first_of(day.server, name, START_SECONDS)
    assert first is not None
    assert (first["state_type"], first["auto_scheduled"]) == ("COMPLETED", True)
    day.switch("pause")
    day.rests(name)
    begun = len(day.runs(name))
    assert not comes(35, lambda: len(day.runs(name)) > begun)
    write_corpus(day.folder / "arrivals" / "b.jsonl", 20, seed=2)
    day.switch("resume")
    current = day.yard.tiny / "current.json"
    before = current.read_bytes()
    assert comes(START_SECONDS, lambda: current.read_bytes() != before)
    day.switch("pause")
    day.rests(name)
    for one in day.runs(name):
        assert one["parameters"].get("recipe") == day.recipe
    versions = [path.name for path in (day.yard.tiny / "versions").iterdir()]
    assert sorted(name.partition("-")[0] for name in versions) == ["0001", "0002"]


def by_every_way(day: Day) -> None:
    """By REST, by the form, by Prefect's command line, by ours: one result, made once."""
    output = day.folder / "plan"
    document = plan(day.folder, str(output))
    run = day.server.begin("run-stage/site", stage="plan", config=document)
    day.ends(run)
    made = (output / "manifest.json").stat()
    if any(map(shutil.which, browser.NAMES)):
        for generation in GENERATIONS:
            day.ends(by_the_form(day, generation, document))
    asked = ["--param=stage=plan", f"--param=config={document}"]
    day.prefect("deployment", "run", "run-stage/site", *asked)
    again = day.runs("run-stage/site")[-1]["id"]
    assert again != run
    day.ends(again)
    done = day.yard.run("-m", "flows.run_stage", "plan", "--config", document)
    assert (done.status, str(output) in done.out) == (0, True), done.err
    assert done.states() == {"plan": "reused"}
    seen = (output / "manifest.json").stat()
    assert (seen.st_ino, seen.st_mtime_ns) == (made.st_ino, made.st_mtime_ns)
    assert comes(30, lambda: "reused" in day.log(again) or "nothing to do" in day.log(again))


def by_the_form(day: Day, generation: str, document: str) -> str:
    """The run that a browser requests by the form of run-stage."""
    there = day.server.ask("deployments/name/run-stage/site")["id"]
    pages = Target(day.server.url.removesuffix("/api"), SECRET, day.folder, ())
    with browser_page(pages) as page:
        form = Form(page, pages, generation, there)
        form.choose("stage", "plan")
        form.fill("config", document)
        return form.submit()


def without_a_password(day: Day) -> None:
    """The server takes no run with a password, and keeps nothing of it."""
    before = len(day.runs("run-stage/site"))
    url = "s3://key:hunter2@host/plan.toml"
    for given in ({"config": url}, {"options": {"input": [{"of": url}]}}):
        with pytest.raises(urllib.error.HTTPError) as refused:
            day.server.begin("run-stage/site", stage="plan", **given)
        assert refused.value.code in (409, 422)
    assert len(day.runs("run-stage/site")) == before


def cancelled(day: Day) -> None:
    run, save = day.train("cancelled", LONG)
    day.server.cancel(run)
    day.ends(run, "CANCELLED")
    assert comes(30, lambda: not pids(f"stages.pretrain --config {day.folder}"))
    assert 0 < steps(save)[-1] < LONG


def after_its_flow_is_killed(day: Day) -> None:
    """Its stage ends with it; the run waits for a person, and goes on from its last step."""
    run, save = day.train("flow")
    pid = int(day.server.ask(f"flow_runs/{run}")["infrastructure_pid"].rpartition(":")[2])
    os.kill(pid, signal.SIGKILL)
    day.ends(run, "CRASHED")
    assert comes(30, lambda: not pids(f"stages.pretrain --config {day.folder}"))
    reached = steps(save)[-1]
    assert reached < ITERS
    day.server.press_retry(run)
    assert comes(START_SECONDS, lambda: steps(save)[-1] > reached), day.log(run)
    day.check_once(run, save)


def after_its_stage_is_killed(day: Day) -> None:
    """The flow starts it again, from its last step."""
    run, save = day.train("stage")
    for pid in pids(f"stages.pretrain --config {day.folder}"):
        os.kill(pid, signal.SIGKILL)
    day.check_once(run, save)
    assert "Crashed" not in day.history(run)


def after_the_server_is_killed(day: Day) -> None:
    """Worker and flow go on without it, and tell the next one."""
    run, save = day.train("server")
    day.server.process.kill()
    day.server.process.wait()
    reached = steps(save)[-1]
    assert comes(60, lambda: steps(save)[-1] > reached)
    day.server.start()
    day.server.wait()
    day.check_once(run, save)
