"""The yard of docker-compose.yml when its database, server, worker or training fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.yard.compose.composed import ITERATIONS, Run, api, begin, registered
from tests.yard.compose.engine import Compose, docker
from tests.yard.faults.faults import logs, steps
from tests.yard.operator.deployed import comes

pytestmark = [pytest.mark.yard, pytest.mark.full, pytest.mark.timeout(1200)]

AWAY_SECONDS = 30
LONG = 2000
"""Steps of a training that somebody has the time to stop."""
JOBS = {
    *("plan", "tokenize-a", "merge", "pretrain", "reshard", "export", "evaluate"),
    *("benchmark", "report"),
}


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    with registered(tmp_path_factory.mktemp("trouble")) as yard:
        yield yard


# --- the database is away for half a minute -------------------------------------------------------


def is_planned(run: Run) -> bool:
    """Before the short stages, each of which is reported to the server."""
    return (run.made / "plan" / "manifest.json").exists()


def is_training(run: Run) -> bool:
    return bool(steps(run.checkpoint))


def training(yard: Compose) -> str:
    """The container of the training that runs."""
    ours = ("--filter", f"volume={yard.home}", "--filter", "name=trainyard-pretrain-")
    (container,) = docker("ps", "--quiet", *ours).stdout.split()
    return container


def restarts(yard: Compose, *services: str) -> list[str]:
    """When and how often containers of services were started."""
    names = yard.run("ps", "--quiet", *services).stdout.split()
    template = "{{.Name}} {{.State.StartedAt}} {{.RestartCount}}"
    return docker("inspect", "--format", template, *names).stdout.splitlines()


def check_ran_once(yard: Compose, run: Run) -> None:
    """One flow run, one submission of each job, every step once."""
    assert api(yard).ask(f"flow_runs/{run.id}")["run_count"] == 1
    submissions = run.submissions()
    assert set(submissions.values()) == {("submitted", "started", "ended")}
    assert sorted(name.partition("/")[0] for name in submissions) == sorted(JOBS)
    assert run.trained() == list(range(1, ITERATIONS + 1))


@pytest.mark.parametrize("begins", [is_planned, is_training])
@pytest.mark.parametrize(("leave", "come"), [("stop", "start"), ("pause", "unpause")])
def test_a_database_outage_of_half_a_minute_costs_nothing(
    yard: Compose, leave: str, come: str, begins: Callable[[Run], bool]
) -> None:
    run = begin(yard, f"{leave}-{begins.__name__.replace('_', '-')}")
    before = restarts(yard, "server", "worker")
    assert comes(120, lambda: begins(run)), yard.run("logs", "worker").stdout
    yard.run(leave, "postgres")
    try:
        time.sleep(AWAY_SECONDS / 2)
        assert run.state() == ""
        time.sleep(AWAY_SECONDS / 2)
    finally:
        yard.run(come, "postgres")
    assert run.ended(300) == "COMPLETED", yard.run("logs", "worker").stdout
    assert restarts(yard, "server", "worker") == before
    check_ran_once(yard, run)


# --- the server dies ------------------------------------------------------------------------------


def die(yard: Compose, service: str) -> None:
    """Kill all that runs in a container but its first process, which then ends as they did.

    As the kernel does when memory is short. `docker kill` is another thing: what a person ended the
    engine does not start again."""
    yard.run("exec", "--no-TTY", service, "sh", "-c", "kill -KILL -1", check=False)


def restart(yard: Compose, service: str) -> None:
    yard.run("restart", service)


@pytest.mark.parametrize(
    ("end", "begins"), [(die, is_training), (die, is_planned), (restart, is_training)]
)
def test_a_server_that_is_started_again_in_the_middle_costs_nothing(
    yard: Compose, end: Callable[[Compose, str], None], begins: Callable[[Run], bool]
) -> None:
    run = begin(yard, f"server-{end.__name__}-{begins.__name__.replace('_', '-')}")
    server, others = restarts(yard, "server"), restarts(yard, "worker", "postgres")
    assert comes(240, lambda: begins(run)), yard.run("logs", "worker").stdout
    end(yard, "server")
    assert comes(240, lambda: yard.states()["server"] == "healthy")
    assert restarts(yard, "server") != server
    assert run.ended(300) == "COMPLETED", yard.run("logs", "worker").stdout
    assert restarts(yard, "worker", "postgres") == others
    check_ran_once(yard, run)


# --- the worker dies ------------------------------------------------------------------------------


def test_a_training_outlives_its_worker_and_the_next_one_follows_it(yard: Compose) -> None:
    """The flow run dies with it; its silence is noticed after two minutes, and it begins again."""
    run = begin(yard, "orphan", LONG)
    before = restarts(yard, "worker")
    assert comes(240, lambda: is_training(run)), yard.run("logs", "worker").stdout
    container = training(yard)
    docker("pause", container)  # so that it does not end before it is followed again
    try:
        die(yard, "worker")
        assert comes(120, lambda: yard.states()["worker"] == "healthy")
        assert restarts(yard, "worker") != before
        assert comes(300, lambda: "reattached" in str(run.submissions()))
    finally:
        docker("unpause", container)
    assert run.ended(300) == "COMPLETED", yard.run("logs", "worker").stdout
    submissions = run.submissions().items()
    (seen,) = [
        events for name, events in submissions if name.startswith("pretrain/")
    ]  # one training
    assert seen == ("submitted", "started", "reattached", "ended")
    assert api(yard).ask(f"flow_runs/{run.id}")["run_count"] == 2
    assert run.trained() == list(range(1, LONG + 1))


# --- the worker is stopped ------------------------------------------------------------------------


def test_a_stopped_worker_saves_its_runs_and_the_next_one_resumes(yard: Compose) -> None:
    run = begin(yard, "stopped", LONG, saves=500)
    assert comes(240, lambda: is_training(run)), yard.run("logs", "worker").stdout
    yard.run("stop", "worker")
    log = yard.run("logs", "worker").stdout
    assert comes(30, lambda: run.state() == "SCHEDULED"), log  # crashed, and to be resumed
    assert "asked to stop" in logs(run.folder), log
    assert steps(run.checkpoint)[-1] % 500, "it did not save when it was stopped"
    yard.run("up", "--detach", "--wait", "--no-build", "worker")
    assert run.ended(300) == "COMPLETED", yard.run("logs", "worker").stdout
    assert run.trained() == list(range(1, LONG + 1))


# --- Retry pressed --------------------------------------------------------------------------------


def test_published_stages_are_reused_and_the_failed_container_resumes(yard: Compose) -> None:
    """Somebody stops the container of a training: the run fails, a person looks, presses Retry."""
    run = begin(yard, "retried", LONG)
    assert comes(240, lambda: is_training(run)), yard.run("logs", "worker").stdout
    docker("stop", "--time", "60", training(yard))
    assert run.ended(120) == "FAILED"
    reached = steps(run.checkpoint)[-1]
    assert 0 < reached < LONG
    found = [
        path for path in run.made.rglob("*manifest.json") if run.checkpoint not in path.parents
    ]
    published = {path: path.stat().st_mtime_ns for path in found}
    assert len(published) >= 3

    api(yard).press_retry(run.id)
    # It is FAILED until a worker takes it.
    assert comes(60, lambda: run.state() != "FAILED")
    assert run.ended(300) == "COMPLETED", yard.run("logs", "worker").stdout
    assert api(yard).ask(f"flow_runs/{run.id}")["run_count"] == 2
    assert {path: path.stat().st_mtime_ns for path in published} == published
    assert steps(run.checkpoint)[-1] == LONG
    assert run.trained() == list(range(1, LONG + 1))  # no step was made twice
    attempts = [name for name in run.submissions() if name.startswith("pretrain/")]
    assert len(attempts) == 2
    stages = run.shown("pretrain-gpt-stages")
    for stage in ("tokenize-a", "merge", "plan"):
        assert f"| `{stage}` | reused |" in stages
    assert "| `pretrain` | done |" in stages
