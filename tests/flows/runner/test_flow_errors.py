"""Our errors as the state of a flow run; real runs: tests/yard/operator/test_deployment.py."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys

import pytest
from prefect.client.schemas.objects import State

from flows.backends.outcome import Kind, Outcome, StageError
from flows.runner.flow_errors import filter_line, report_errors
from trainyard.errors import ConfigError, InfrastructureError

ENDED = Outcome(kind=Kind.DATA, name="merge", message="a.bin is torn", exit_status=1)


@pytest.mark.parametrize(
    "error", [ConfigError("lr must be positive"), InfrastructureError("away"), StageError(ENDED)]
)
def test_an_error_of_ours_is_a_failed_state_with_its_message(error: Exception) -> None:
    @report_errors
    async def run() -> object:
        raise error

    state = asyncio.run(run())
    assert isinstance(state, State)
    assert (state.is_failed(), state.message) == (True, str(error))
    with pytest.raises(type(error)):
        asyncio.run(state.aresult())


def test_results_and_defects_pass_through() -> None:
    @report_errors
    async def run(given: int) -> float:
        return 12 / given

    assert asyncio.run(run(4)) == 3.0
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run(0))


def test_prefect_sees_the_parameters_and_their_types() -> None:
    async def run(recipe: str, count: int = 3) -> None:
        """What it does."""

    reporting = report_errors(run)
    assert inspect.signature(reporting) == inspect.signature(run, eval_str=True)
    assert (reporting.__name__, reporting.__doc__) == ("run", "What it does.")


def record(error: Exception) -> logging.LogRecord:
    try:
        raise error
    except Exception:
        return logging.LogRecord("prefect", logging.ERROR, "", 0, "said", (), sys.exc_info())


def test_a_traceback_of_ours_is_left_out_and_that_of_a_defect_stays() -> None:
    ours, defect = record(StageError(ENDED)), record(ZeroDivisionError())
    assert filter_line(ours)
    assert filter_line(defect)
    assert ours.exc_info is None
    assert defect.exc_info is not None


@pytest.mark.parametrize(
    ("line", "is_kept"),
    [
        (
            "Task run failed with exception: merge: hang - Retry 1/100000 will start immediately",
            0,
        ),
        ("Crash detected! Execution was cancelled by the runtime environment.", 0),
        ("Finished in state Crashed('Execution was cancelled by the runtime environment.')", 0),
        ("Finished in state Running()", 0),
        ("Finished in state Failed('Task run encountered an exception ...')", 1),
        ("Crash detected! Request to http://127.0.0.1:4200/api failed.", 1),
    ],
)
def test_prefects_lines_of_a_retry_and_of_a_stopped_run_are_left_out(
    line: str, is_kept: int
) -> None:
    record = logging.LogRecord("prefect.task_runs", logging.ERROR, "", 0, line, (), None)
    assert filter_line(record) is bool(is_kept)
