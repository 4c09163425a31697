"""Which failures are retried, and when a retry loop ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect.client.schemas.objects import State
from prefect.logging import disable_run_logger
from prefect.states import Failed

from flows.backends.outcome import RETRYABLE, Kind, Outcome, StageError
from flows.recipes.stage_job import StageJob
from flows.recipes.summary import Summary
from flows.runner import retry, stage_task
from flows.runner.retry import (
    PAUSES_SECONDS,
    FailedAttempts,
    no_retry_reason,
    pause_seconds,
    reached_step,
    with_jitter,
)
from flows.runner.stage_task import StageEnvironment, run_stage_task, should_retry
from trainyard.artifacts import store
from trainyard.artifacts.output import Output
from trainyard.errors import ConfigError, InfrastructureError


def failed(kind: Kind = Kind.PREEMPTED, step: int | None = None) -> Outcome:
    return Outcome(name="pretrain", kind=kind, exit_status=3, message="m", step=step)


def training(folder: Path, *published: int, unfinished: Sequence[int] = ()) -> StageJob:
    """A job whose run folder holds these steps."""
    for step in (*published, *unfinished):
        (folder / f"iter_{step:07d}").mkdir(parents=True)
    for step in published:
        (folder / f"iter_{step:07d}" / "manifest.json").write_text("{}")
    return StageJob(stage="pretrain", document={}, output=Output.directory(str(folder)))


def count(steps: Sequence[int | None]) -> FailedAttempts:
    failed = FailedAttempts()
    for step in steps:
        failed.record(step)
    return failed


@pytest.mark.parametrize(
    ("steps", "fruitless"),
    [
        ([], 0),
        ([None], 1),
        ([None, None, None], 3),
        ([10], 0),
        ([10, 10], 1),
        ([10, 10, 20, 20, 20], 2),
        ([10, None, 5, 10], 3),
        ([None, 10], 0),
    ],
)
def test_attempts_that_get_no_further_are_counted(steps: list[int | None], fruitless: int) -> None:
    assert count(steps).fruitless == fruitless


@given(st.lists(st.integers(0, 20)), st.integers(1, 4))
def test_attempts_end_however_they_fail(steps: list[int], limit: int) -> None:
    failed = count(steps)
    for step in range(limit):
        failed.record(20 - step)
    failed.record(0)
    assert failed.fruitless >= limit
    assert failed.furthest is not None
    assert failed.furthest >= max([20, *steps])


def test_only_published_steps_count_as_reached(tmp_path: Path) -> None:
    job = training(tmp_path / "run", 50, 100, unfinished=[150])
    assert reached_step(job, failed()) == 100
    assert reached_step(job, failed(step=70)) == 100
    assert reached_step(job, failed(step=120)) == 100  # what came behind it is lost
    unsaved = training(tmp_path / "new", unfinished=[50])
    (tmp_path / "new" / "iter_0000050" / "state.json").write_text("{}")
    assert reached_step(unsaved, failed(step=57)) is None
    elsewhere = training(tmp_path / "local")  # on a disk that this program cannot see
    assert reached_step(elsewhere, failed(step=120)) == 120


def test_a_job_without_steps_reaches_none(tmp_path: Path) -> None:
    nowhere = StageJob(stage="merge", document={}, output=Output.prefix(str(tmp_path / "tokens")))
    assert reached_step(nowhere, failed()) is None
    assert reached_step(StageJob(stage="verify", document={}, output=None), failed()) is None
    assert reached_step(training(tmp_path / "run"), failed()) is None


def away(url: str) -> dict[str, int]:
    raise InfrastructureError("the store does not answer")


def test_step_that_could_not_be_published_is_no_mark(
    tmp_path: Path, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{store_url}/run"
    job = StageJob(stage="pretrain", document={}, output=Output.directory(url))
    store.write_bytes(f"{url}/claim.json", b"{}")
    assert reached_step(job, failed(step=120)) is None
    store.write_bytes(f"{url}/iter_0000100/manifest.json", b"{}")
    assert reached_step(job, failed(step=120)) == 100
    attempts = FailedAttempts()
    with monkeypatch.context() as patch:
        patch.setattr(retry.store, "list_files", away)
        attempts.record(reached_step(job, failed(step=120)))
    assert (attempts.furthest, attempts.fruitless) == (None, 1)
    attempts.record(reached_step(job, failed(step=110)))
    assert (attempts.furthest, attempts.fruitless) == (100, 0)


def test_pauses_grow_and_have_an_end() -> None:
    assert list(PAUSES_SECONDS) == sorted(PAUSES_SECONDS)
    assert PAUSES_SECONDS[0] < 10
    assert 120 <= PAUSES_SECONDS[-1] <= 600
    assert pause_seconds(10**6) == PAUSES_SECONDS[-1]
    assert run_stage_task.retry_delay_seconds == 0  # Prefect's would be a second one


@given(st.floats(0.1, 1000))
def test_jobs_that_fell_together_do_not_come_back_together(seconds: float) -> None:
    assert seconds <= with_jitter(seconds) <= 1.2 * seconds


@pytest.mark.parametrize(
    ("steps", "pauses"),
    [
        ([None, None, None], [0, 1, 2]),
        ([10, 20, 30, 40], [0, 0, 0, 0]),
        ([10, 10, 10, 20, 20, None], [0, 1, 2, 0, 1, 2]),
        ([None, 10, 10], [0, 0, 1]),
    ],
)
def test_pauses_restart_with_progress(steps: list[int | None], pauses: list[int]) -> None:
    failed, found = FailedAttempts(), []
    for step in steps:
        failed.record(step)
        found.append(failed.pause_seconds)
    assert found == [PAUSES_SECONDS[at] for at in pauses]


def test_waiting_for_a_claim_has_pauses_of_its_own() -> None:
    failed = FailedAttempts()
    failed.record(10)
    for pause in (*PAUSES_SECONDS, PAUSES_SECONDS[-1]):
        failed.record_claim_held()
        assert failed.pause_seconds == pause
    failed.record(10)
    assert (failed.fruitless, failed.pause_seconds) == (1, PAUSES_SECONDS[1])
    failed.record_claim_held()
    assert failed.pause_seconds == PAUSES_SECONDS[0]


def test_the_reason_against_a_retry_is_in_the_error() -> None:
    error = StageError(failed(), "log.txt", no_retry_reason(count([40, 40, 40])))
    assert str(error).endswith(
        "(2 attempts in a row failed and none got beyond step 40: not retried)"
    )
    assert no_retry_reason(count([None])) == "an attempt failed: not retried"


@pytest.mark.parametrize("kind", list(Kind))
def test_what_is_tried_again(kind: Kind) -> None:
    def judged(error: StageError) -> bool:
        state: State[object] = Failed(data=error)
        return asyncio.run(should_retry(None, None, state))  # type: ignore[arg-type]

    assert judged(StageError(failed(kind))) is (kind in RETRYABLE)
    assert not judged(StageError(failed(kind), "", "no further"))


class Attempts:
    """Attempts that fail, each having published a step, until they do not."""

    def __init__(self, folder: Path, steps: Sequence[int]) -> None:
        self.steps = list(steps)
        self.made = 0
        self.outcome = failed()
        self.job = training(folder)

    async def __call__(self, job: StageJob, site: StageEnvironment) -> Summary:
        self.made += 1
        if not self.steps:
            return Summary(job="pretrain", stage="pretrain", reused=False, reason="", seconds=0)
        assert job.output is not None
        folder = Path(job.output.url, f"iter_{self.steps.pop(0):07d}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").write_text("{}")
        raise StageError(self.outcome)


def try_all(attempts: Attempts, limit: int, monkeypatch: pytest.MonkeyPatch) -> StageError | None:
    """As Prefect does: again as long as it is worth it."""
    monkeypatch.setattr(stage_task, "_attempt", attempts)
    monkeypatch.setattr(stage_task.runtime.task_run, "id", "run-1", raising=False)
    monkeypatch.setattr(stage_task, "_failed_attempts", {})
    monkeypatch.setattr(retry, "PAUSES_SECONDS", (0.0,))
    site = StageEnvironment(run_folder="unused", fruitless_attempts=limit)

    async def whole() -> StageError | None:
        while True:
            try:
                await run_stage_task.fn(attempts.job, site)
            except StageError as error:
                state: State[object] = Failed(data=error)
                if not await should_retry(None, None, state):  # type: ignore[arg-type]
                    return error
            else:
                return None

    with disable_run_logger():
        return asyncio.run(whole())


def test_progress_is_always_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = Attempts(tmp_path / "run", range(10, 200, 10))
    assert try_all(attempts, 2, monkeypatch) is None
    assert attempts.made == 20


@pytest.mark.parametrize("limit", [1, 3])
def test_no_progress_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    attempts = Attempts(tmp_path / "run", [10, 20] + [20] * 9)
    error = try_all(attempts, limit, monkeypatch)
    assert error is not None
    assert error.no_retry_reason.endswith("none got beyond step 20: not retried")
    assert attempts.made == 2 + limit


def test_waiting_for_a_claim_does_not_count_as_an_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = Attempts(tmp_path / "run", [10] * 9)
    monkeypatch.setattr(attempts, "outcome", replace(failed(), error="ClaimHeldError"))
    assert try_all(attempts, 1, monkeypatch) is None
    assert attempts.made == 10


def test_no_attempt_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="fruitless_attempts must be at least 1"):
        StageEnvironment(run_folder="x", fruitless_attempts=0)
    assert StageEnvironment(run_folder="x").python == sys.executable
