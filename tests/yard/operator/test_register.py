"""`python -m flows.register` on a real server, with a password and CSRF protection on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from flows.register.desired_state import read_deployments
from tests.yard.operator.deployed import WholeServer, comes, working
from tests.yard.yard import ROOT, Yard

pytestmark = [pytest.mark.yard, pytest.mark.timeout(400)]

PASSWORD = "yard:geheim"
PREFECT_SCHEDULE = ("prefect", "deployment", "schedule")
ENTRIES = read_deployments(ROOT / "prefect.yaml")
FLOWS = [entry["entrypoint"].partition(":")[2].replace("_", "-") for entry in ENTRIES]

PROFILE = """
[pool]
concurrency_limit = 3

[limits]
pretrain = 2

[automations]
train_on_new_corpus = "recipes/quickstart.toml"

[schedules.corpus-refresh]
cron = "0 3 * * *"
timezone = "Europe/Berlin"
"""


CHAT = {"TRAINYARD_NOTIFY_URL": "http://127.0.0.1:9/hook"}
NUMBERS = count(1)


class Server(WholeServer):
    """A Prefect server with a password."""

    def register(
        self, *arguments: str, password: str | None = PASSWORD, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        given = self.environment
        if password is not None:
            given["PREFECT_API_AUTH_STRING"] = password
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        return subprocess.run(
            [sys.executable, "-m", "flows.register", *arguments],
            env={**kept, **given, **variables},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"), PASSWORD)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The profile of a yard of one test alone, since all share the server."""
    path = tmp_path / f"site{next(NUMBERS)}.toml"
    path.write_text(PROFILE)
    return path


@pytest.fixture
def registered(server: Server, site: Path) -> Path:
    """The same, registered with a chat."""
    assert verbs(server.register("--yard", str(site), **CHAT)) <= {"created", "unchanged"}
    return site


def verbs(done: subprocess.CompletedProcess[str]) -> set[str]:
    assert done.returncode == 0, done.stderr
    return {line.split("  ")[0].strip() for line in done.stdout.splitlines()}


def test_a_yard_is_registered_once_and_again_nothing_changes(server: Server, site: Path) -> None:
    name, given = site.stem, ("--yard", str(site))
    before = server.ask("deployments/filter", {})
    assert "would create" in verbs(server.register(*given, "--dry-run"))
    assert server.ask("deployments/filter", {}) == before
    assert verbs(server.register(*given, **CHAT)) <= {"created", "unchanged"}
    again = server.register(*given, **CHAT)
    assert verbs(again) == {"unchanged"}
    assert "0 written" in again.stderr

    found = [server.ask(f"deployments/name/{flow}/{name}") for flow in FLOWS]
    assert len(server.ask("deployments/filter", {})) == len(before) + len(found)
    for one in found:
        assert (one["work_pool_name"], one["parameters"]["profile"]) == (name, name)
        assert one["enforce_parameter_schema"]
    refresh = found[FLOWS.index("corpus-refresh")]
    assert refresh["schedules"][0]["schedule"]["cron"] == "0 3 * * *"
    form = found[FLOWS.index("pretrain-gpt")]["parameter_openapi_schema"]["properties"]
    assert form["lr"]["type"] == "number"
    assert "recipes/quickstart.toml" in form["recipe"]["anyOf"][0]["enum"]
    assert server.ask(f"work_pools/{name}")["concurrency_limit"] == 3
    limits = server.ask(f"concurrency_limits/tag/yard:{name}:pretrain")
    assert limits["concurrency_limit"] == 2
    automations = {one["name"] for one in server.ask("automations/filter", {})}
    assert {one for one in automations if one.startswith(f"trainyard {name}:")} == {
        f"trainyard {name}: {what}"
        for what in ("zombie runs", "cancelled runs", "crashed runs", "failures", "new corpus")
    }


@pytest.mark.full
def test_only_what_the_profile_changed_is_written(server: Server, registered: Path) -> None:
    registered.write_text(PROFILE.replace("= 3", "= 4").replace("0 3 *", "0 4 *"))
    done = server.register("--yard", str(registered))
    changed = [line for line in done.stdout.splitlines() if line.startswith("changed")]
    assert [line.split()[1] for line in changed] == ["work", "block", "deployment"]
    assert changed[2].endswith(f"corpus-refresh/{registered.stem}: schedule")
    assert server.ask(f"work_pools/{registered.stem}")["concurrency_limit"] == 4
    refresh = refresh_of(server, registered.stem)
    assert [one["schedule"]["cron"] for one in refresh["schedules"]] == ["0 4 * * *"]


def refresh_of(server: Server, yard: str) -> dict[str, Any]:
    found: dict[str, Any] = server.ask(f"deployments/name/corpus-refresh/{yard}")
    return found


@pytest.mark.full
def test_a_schedule_paused_by_a_person_stays_paused(server: Server, registered: Path) -> None:
    """The schedule's switch and the deployment's, as Prefect's pages send them."""
    before = refresh_of(server, registered.stem)
    schedule = before["schedules"][0]
    assert schedule["active"]
    one = f"deployments/{before['id']}/schedules/{schedule['id']}"
    server.ask(one, {"active": False}, "PATCH")
    done = server.register("--yard", str(registered))
    assert verbs(done) == {"unchanged", "kept", "left over"}  # no URL of a chat this time
    assert f"corpus-refresh/{registered.stem}: schedule paused" in done.stdout

    server.ask(f"deployments/{before['id']}", {"paused": True}, "PATCH")
    registered.write_text(PROFILE.replace("0 3 *", "0 5 *"))
    assert "changed" in verbs(server.register("--yard", str(registered)))
    after = refresh_of(server, registered.stem)
    (schedule,) = after["schedules"]
    assert (schedule["schedule"]["cron"], schedule["active"]) == ("0 5 * * *", False)
    assert after["paused"]


@pytest.mark.full
def test_leftovers_are_named_and_kept(server: Server, registered: Path) -> None:
    name, flows = registered.stem, '["pretrain-gpt", "corpus-refresh"]'
    text = PROFILE.replace("[limits]\npretrain = 2\n", "")
    text = text.replace("[automations]", "[automations]\nzombie_seconds = 0\nresume_crashed = 0")
    registered.write_text(f"deployments = {flows}\n{text}")
    done = server.register("--yard", str(registered))
    left = [line.split(None, 2)[2] for line in done.stdout.splitlines() if line.startswith("left")]
    named = [line.partition(" (")[0] for line in left]
    gone = [flow for flow in sorted(FLOWS) if flow not in flows]
    assert named == [
        *(f"deployment {flow}/{name}" for flow in gone),
        f"limit for yard:{name}:pretrain",
        *(
            f"automation trainyard {name}: {what}"
            for what in ("cancelled runs", "crashed runs", "failures", "zombie runs")
        ),
    ]
    assert f"prefect deployment delete release/{name}" in left[gone.index("release")]
    for flow in gone:
        assert server.ask(f"deployments/name/{flow}/{name}")["name"] == name


def test_without_the_password_the_error_names_the_variable(server: Server) -> None:
    refused = server.register(password=None)
    assert refused.returncode == 2
    assert "PREFECT_API_AUTH_STRING" in refused.stderr


def test_without_a_server_the_error_names_the_url(server: Server) -> None:
    nowhere = server.register(PREFECT_API_URL="http://127.0.0.1:9/api")
    assert nowhere.returncode == 3
    assert "http://127.0.0.1:9/api" in nowhere.stderr


@pytest.mark.full
def test_prefect_takes_the_file_and_a_registration_puts_back_what_it_lacks(server: Server) -> None:
    """`prefect deploy`, as the head of prefect.yaml has it."""
    only = ("--yard", "local")
    assert verbs(server.register(*only)) <= {"created", "unchanged"}
    variables = {**server.environment, "PREFECT_API_AUTH_STRING": PASSWORD}
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"],
        env={k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")} | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for flow in FLOWS:
        one = server.ask(f"deployments/name/{flow}/local")
        assert (one["work_pool_name"], one["tags"]) == ("local", [flow])
        (step,) = one["pull_steps"]
        assert step == {"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}
    assert "changed" in verbs(server.register(*only))
    assert "yard:local" in server.ask("deployments/name/pretrain-gpt/local")["tags"]
    assert verbs(server.register(*only)) == {"unchanged"}


@contextmanager
def chat() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A chat's URL, and the posted messages."""
    posted: list[dict[str, Any]] = []

    class Chat(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # http.server's name
            length = int(self.headers["Content-Length"])
            posted.append(json.loads(self.rfile.read(length)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Chat) as listening:
        Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}/hook", posted
        listening.shutdown()


@pytest.mark.full
def test_a_failure_is_posted(server: Server, tmp_path: Path) -> None:
    """Of a run that a worker took up; its words hold what templates and JSON stumble over."""
    profile = tmp_path / "told.toml"
    profile.write_text('deployments = ["run-stage"]\n')
    missing = 'the "newest",\n<one> {{ of }} all.toml'
    with chat() as (url, posted):
        assert verbs(server.register("--yard", str(profile), TRAINYARD_NOTIFY_URL=url))
        yard = Yard(tmp_path, {**server.environment, "PREFECT_API_AUTH_STRING": PASSWORD})
        with working(yard, "told") as worker:
            run = server.begin("run-stage/told", stage="merge", config=missing)
            assert comes(90, lambda: posted), worker.output
    (post,) = posted
    assert server.state(run) == "FAILED"
    name, _, failure = post["text"].partition(" in yard told: ")
    assert name.startswith("run-stage/merge ")
    assert failure.startswith(f"Failed. --config {missing} cannot be read: ")


def test_a_refusal_of_prefect_leaves_no_half_registered_yard(
    server: Server, tmp_path: Path
) -> None:
    profile = tmp_path / "wrong.toml"
    profile.write_text('[schedules.corpus-refresh]\ncron = "0 3 * *"\n')
    before = {kind: server.ask(f"{kind}/filter", {}) for kind in ("work_pools", "block_documents")}
    refused = server.register("--yard", str(profile))
    assert refused.returncode == 2
    assert f"{profile}: yard wrong [schedules.corpus-refresh]: cron '0 3 * *'" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert {kind: server.ask(f"{kind}/filter", {}) for kind in before} == before


SCHEDULED = """
deployments = ["corpus-refresh", "collect-garbage"]

[schedules.corpus-refresh]
cron = "0 3 * * *"
parameters = { recipe = "recipes/mine.toml" }

[schedules.collect-garbage]
cron = "30 4 * * 0"
parameters = { run_days = 90 }
"""


def planned(server: Server, deployment: str) -> dict[str, Any]:
    """The parameters of the next run that the server plans by itself."""
    found: dict[str, Any] = server.ask(f"deployments/name/{deployment}")
    server.ask(f"deployments/{found['id']}/schedule", {})  # not waiting for the scheduler's minute
    runs = server.ask(
        "flow_runs/filter",
        {
            "deployments": {"id": {"any_": [found["id"]]}},
            "flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}},
        },
    )
    parameters = [run["parameters"] for run in runs]
    assert all(one == parameters[0] for one in parameters)
    return dict(parameters[0])


def test_paused_and_resumed_schedules_keep_their_parameters(server: Server, tmp_path: Path) -> None:
    """By Prefect's command line, and by the shortest request that its API takes."""
    profile = tmp_path / "kept.toml"
    profile.write_text(SCHEDULED)
    assert verbs(server.register("--yard", str(profile))) <= {"created", "unchanged"}
    variables = {**server.environment, "PREFECT_API_AUTH_STRING": PASSWORD}
    wanted = {
        "corpus-refresh/kept": {"recipe": "recipes/mine.toml", "profile": "kept"},
        "collect-garbage/kept": {"run_days": 90, "profile": "kept"},
    }
    for name, parameters in wanted.items():
        assert planned(server, name) == parameters
        deployment = server.ask(f"deployments/name/{name}")
        (schedule,) = deployment["schedules"]
        one = f"deployments/{deployment['id']}/schedules/{schedule['id']}"
        server.ask(one, {"active": False}, "PATCH")
        server.ask(one, {"active": True}, "PATCH")
        assert planned(server, name) == parameters
    for verb in ("pause", "resume"):
        done = subprocess.run(
            [sys.executable, "-m", *PREFECT_SCHEDULE, verb, name, schedule["id"]],
            env={k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")} | variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert planned(server, name) == parameters
    assert "unchanged" in verbs(server.register("--yard", str(profile)))


def test_a_removed_parameter_names_its_replacement(server: Server, tmp_path: Path) -> None:
    profile = tmp_path / "old.toml"
    profile.write_text(SCHEDULED.replace("run_days = 90", "dry_run = true"))
    refused = server.register("--yard", str(profile))
    assert refused.returncode == 2
    assert "dry_run (True) has become `remove`, which is off by default" in refused.stderr


@pytest.mark.full
def test_two_yards_of_one_block_are_not_mixed_up(server: Server, tmp_path: Path) -> None:
    first, second = tmp_path / "my-site.toml", tmp_path / "my_site.toml"
    for profile in (first, second):
        profile.write_text('deployments = ["run-stage"]\n')
    assert verbs(server.register("--yard", str(first))) <= {"created", "unchanged", "left over"}
    refused = server.register("--yard", str(second))
    assert refused.returncode == 2
    assert "yard my_site and yard my-site, which is registered" in refused.stderr
    block = server.ask("block_types/slug/yard-profile/block_documents/name/my-site")
    assert block["data"]["yard"] == "my-site"
    assert "my_site" not in {one["name"] for one in server.ask("work_pools/filter", {})}
