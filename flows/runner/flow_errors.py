"""Failures of a flow run told in words: its state says what was wrong and what to do, without a
traceback over it in its log.

Prefect takes an exception that leaves a flow for a defect of the flow. Of our own errors that is
not so: a person reads them. What is none of these keeps its traceback."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, cast

from prefect.states import Failed

from flows.backends.outcome import StageError
from flows.runner.cancellation import run_until_cancelled
from trainyard.errors import TrainyardError

P = ParamSpec("P")
R = TypeVar("R")

OURS = (TrainyardError, StageError)

LOGGERS = ("prefect.task_runs", "prefect.engine")
"""Those by which Prefect tells of an exception: of a task that failed, and of a program that runs a
flow and ended with it."""


def report_errors(
    run: Callable[P, Coroutine[Any, Any, R]],
) -> Callable[P, Coroutine[Any, Any, R]]:
    """A flow's function that ends its run as Failed, with the words of an error of ours, and as
    Cancelled where somebody cancels it meanwhile.

    Whoever calls the flow gets the error itself, as before."""

    @functools.wraps(run)
    async def told(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in LOGGERS:
            logging.getLogger(name).addFilter(without_traceback)
        try:
            return await run_until_cancelled(run(*args, **kwargs))
        except OURS as error:
            # What a flow returns in the place of a result is its state.
            return cast(R, Failed(message=str(error), data=error))

    # Prefect would look for the names of types in this module, not in that of the flow.
    vars(told)["__signature__"] = inspect.signature(run, eval_str=True)
    return told


def without_traceback(record: logging.LogRecord) -> bool:
    """Take the traceback of an error of ours from a record; a filter that lets all records pass."""
    if record.exc_info and isinstance(record.exc_info[1], OURS):
        record.exc_info = None
    return True
