"""A job whose scheduler is away is submitted once, looked for again, reported and cancelled."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from prefect.client.schemas.objects import State
from prefect.logging import disable_run_logger
from prefect.states import Failed

from flows.backends.outcome import Kind, StageError
from flows.backends.run_folder import read_stop_record
from flows.backends.slurm.client import CommandResult
from flows.backends.slurm.script import EXIT
from flows.backends.spec import LaunchSpec
from flows.recipes.stage_job import StageJob
from flows.recipes.summary import Summary
from flows.runner import retry, stage_task
from flows.runner import submission as following
from flows.runner.stage_task import run_stage_task, should_retry
from flows.runner.submission import SETTLED
from flows.yard.profile import StageEnvironment
from tests.flows.backends.slurm.fake_slurm import AWAY, NO_ACCOUNTING, FakeSlurmJob, shorten_waits

JOB = StageJob(stage="verify", document={}, output=None)
LOOKS = 8
"""More than there are attempts."""


class Controller:
    """Jobs that run until they are ended; away for so many questions."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.asked = 0
        self.away = 0
        self.fault = AWAY
        self.when_asked: Callable[[], object] = lambda: None

    def __call__(self, command: Sequence[str]) -> CommandResult:
        self.asked += 1
        self.when_asked()
        if self.away > 0:
            self.away -= 1
            return self.fault
        return getattr(self, f"_{command[0]}")(command)  # type: ignore[no-any-return]

    def end(self, job_id: str = "1", state: str = "COMPLETED") -> None:
        self.states[job_id] = state

    def _sbatch(self, command: Sequence[str]) -> CommandResult:
        job_id, folder = str(len(self.states) + 1), Path(command[-1]).parent
        self.states[job_id] = "RUNNING"
        self.names[job_id] = f"verify-{folder.name}"
        (folder / EXIT).write_text(json.dumps({"exit_status": 0, "job_id": job_id}))
        return CommandResult(0, f"{job_id}\n", "")

    def _scontrol(self, command: Sequence[str]) -> CommandResult:
        job_id = command[-1]
        words = f"JobId={job_id} JobName={self.names[job_id]} JobState={self.states[job_id]}"
        return CommandResult(0, f"{words} ExitCode=0:0", "")

    def _squeue(self, command: Sequence[str]) -> CommandResult:
        return CommandResult(0, "", "")

    def _sacct(self, command: Sequence[str]) -> CommandResult:
        return NO_ACCOUNTING

    def _scancel(self, command: Sequence[str]) -> CommandResult:
        self.end(command[-1].partition(".")[0], "CANCELLED")
        return CommandResult(0, "", "")


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    """No pause lasts, and stages of Slurm ask this controller."""
    controller = Controller()

    def block(place: StageEnvironment, spec: LaunchSpec, stage: str) -> FakeSlurmJob:
        return FakeSlurmJob(spec=spec, played=controller, poll_seconds=0, patience_seconds=0)

    monkeypatch.setitem(following.JOB_BLOCKS, "slurm", block)
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(retry, "PAUSES_SECONDS", (0.0,))
    shorten_waits(monkeypatch)
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "5b5f4d4e-0000-4000-8000-000000000001")
    monkeypatch.setattr(stage_task.runtime.task_run, "id", "run-1", raising=False)
    monkeypatch.setattr(stage_task, "_failed_attempts", {})
    monkeypatch.setattr(following, "get_run_logger", lambda: logging.getLogger("followed"))
    return controller


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the page of a stage was made to say."""
    states: list[str] = []

    async def show(stage: str, spec: LaunchSpec, state: str, words: str = "") -> None:
        states.append(state)

    monkeypatch.setattr(following, "show_waiting", show)
    return states


@pytest.fixture
def place(tmp_path: Path) -> StageEnvironment:
    return StageEnvironment(run_folder=str(tmp_path / "runs"), backend="slurm")


async def stage(place: StageEnvironment) -> Summary:
    """As Prefect does: again as long as it is worth it."""
    while True:
        try:
            return await run_stage_task.fn(JOB, place)
        except StageError as error:
            state: State[object] = Failed(data=error)
            if not await should_retry(None, None, state):  # type: ignore[arg-type]
                raise


def run(place: StageEnvironment) -> Summary:
    with disable_run_logger():
        return asyncio.run(stage(place))


def folder(place: StageEnvironment, submission: int = 1) -> Path:
    (found,) = Path(place.run_folder, "verify").glob(f"*-{submission}")
    return found


def headlines(caplog: pytest.LogCaptureFixture, state: str) -> list[str]:
    found = (one for one in caplog.records if getattr(one, "headline", "") == state)
    return [one.getMessage() for one in found if one.name == "followed"]


def away_once_it_runs(
    controller: Controller, looks: int, then: Callable[[], None] = lambda: None
) -> None:
    def leave() -> None:
        if controller.states:
            controller.away, controller.when_asked = looks, then

    controller.when_asked = leave


def test_a_job_survives_a_backend_outage_longer_than_all_attempts(
    controller: Controller,
    place: StageEnvironment,
    shown: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def end_when_released() -> None:
        if headlines(caplog, "runs"):
            controller.end()

    away_once_it_runs(controller, LOOKS, then=end_when_released)
    with caplog.at_level(logging.INFO, "followed"):
        assert run(place).job == "verify"
    assert list(controller.states.values()) == ["COMPLETED"]
    (waits,) = headlines(caplog, "waits")
    assert "Slurm's controller has not answered since" in waits
    assert "its job cannot be seen, and may still run" in waits
    assert "Unable to contact slurm controller" in waits
    (seen,) = headlines(caplog, "runs")
    assert "Slurm's controller answers again, after" in seen
    assert [state[:5] for state in shown] == ["waits", "runs:"]
    assert json.loads((folder(place) / SETTLED).read_text())["kind"] == Kind.DONE


def test_a_silent_controller_is_reported_while_its_client_still_asks(
    controller: Controller,
    place: StageEnvironment,
    shown: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(following, "SILENT_SECONDS", 0.02)
    monkeypatch.setattr(following, "AGAIN_SECONDS", 0.05)
    release = threading.Event()

    def hang_once_it_runs() -> None:
        if controller.states:
            release.wait(10)

    def end_when_released() -> None:
        if len(headlines(caplog, "waits")) >= 2:
            controller.when_asked = lambda: headlines(caplog, "runs") and controller.end()
            release.set()

    controller.when_asked = hang_once_it_runs
    looking = threading.Thread(target=lambda: until(release, end_when_released))
    looking.start()
    with caplog.at_level(logging.INFO, "followed"):
        assert run(place).job == "verify"
    looking.join()
    first, second, *_ = headlines(caplog, "waits")
    for line in (first, second):
        assert "waits" in line
        assert "Slurm's controller has not answered since" in line
        assert "asking again (no answer yet)" in line
    assert len(headlines(caplog, "runs")) == 1
    assert [state[:5] for state in shown] == ["waits", "runs:"]


def until(event: threading.Event, look: Callable[[], None]) -> None:
    while not event.wait(0.01):
        look()


def test_a_job_never_submitted_ends(controller: Controller, place: StageEnvironment) -> None:
    controller.away = 10**6
    with pytest.raises(StageError, match="3 attempts in a row failed"):
        run(place)


def test_what_is_no_absence_is_given_up(controller: Controller, place: StageEnvironment) -> None:
    away_once_it_runs(controller, 10**6)
    controller.fault = CommandResult(1, "", "slurm_load_jobs error: Protocol authentication error")
    with pytest.raises(StageError, match=r"authentication error.*3 attempts in a row failed"):
        run(place)
    assert len(controller.states) == 1


@pytest.mark.parametrize("pause", [0.0, 60.0], ids=["while it looks", "between two looks"])
def test_a_stage_cancelled_during_an_outage_ends_and_names_its_job(
    controller: Controller,
    place: StageEnvironment,
    pause: float,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry, "PAUSES_SECONDS", (pause,))
    away_once_it_runs(controller, 10**6)
    cancel(place, lambda: bool(headlines(caplog, "waits")))
    assert "cancelled, and its job could not be stopped" in caplog.text
    assert "It may still be running: end it there (scancel 1)" in caplog.text
    assert controller.states == {"1": "RUNNING"}
    ending = read_stop_record(folder(place))
    assert ending is not None
    assert ending.kind is Kind.STOPPED
    assert not (folder(place) / SETTLED).exists()

    controller.away, controller.when_asked = 0, lambda: end_second(controller)
    run(place)
    assert controller.states == {"1": "CANCELLED", "2": "COMPLETED"}


def end_second(controller: Controller) -> None:
    if "2" in controller.states:
        controller.end("2")


def test_cancelled_between_two_looks_a_job_is_ended_where_its_place_answers_again(
    controller: Controller,
    place: StageEnvironment,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry, "PAUSES_SECONDS", (60.0,))
    away_once_it_runs(controller, 1)
    cancel(place, lambda: bool(headlines(caplog, "waits")))
    assert controller.states == {"1": "CANCELLED"}
    assert json.loads((folder(place) / SETTLED).read_text())["kind"] == Kind.STOPPED


def cancel(place: StageEnvironment, when: Callable[[], bool]) -> None:
    async def whole() -> None:
        going_on = asyncio.create_task(stage(place))
        async with asyncio.timeout(20):
            while not when():
                await asyncio.sleep(0.001)
            going_on.cancel()
            with pytest.raises(asyncio.CancelledError):
                await going_on

    with disable_run_logger():
        asyncio.run(whole())
