"""Makes a failed flow run show an error message as its state, without a traceback in its log.

Prefect treats an exception that leaves a flow as a defect of the flow. Our own errors are messages
for a person instead. All other exceptions keep their traceback."""

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
from trainyard.logging import printable, shortened

P = ParamSpec("P")
R = TypeVar("R")

OURS = (TrainyardError, StageError)

LOGGERS = ("prefect.task_runs", "prefect.engine")
"""Prefect's loggers of exceptions: of a failed task, and of a program whose flow failed."""


def report_errors(
    run: Callable[P, Coroutine[Any, Any, R]],
) -> Callable[P, Coroutine[Any, Any, R]]:
    """Make a flow end as Failed with the message of an error of ours, and as Cancelled when its run
    is cancelled in Prefect. The caller of the flow still gets the error itself."""

    @functools.wraps(run)
    async def reporting(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in LOGGERS:
            logging.getLogger(name).addFilter(without_traceback)
        try:
            return await run_until_cancelled(run(*args, **kwargs))
        except OURS as error:
            # A state that a flow returns becomes the state of its run.
            return cast(R, Failed(message=printable(shortened(str(error))), data=error))

    # Prefect would look for the names of types in this module, not in that of the flow.
    vars(reporting)["__signature__"] = inspect.signature(run, eval_str=True)
    return reporting


def without_traceback(record: logging.LogRecord) -> bool:
    """Remove the traceback of an error of ours; a logging filter that passes every record."""
    if record.exc_info and isinstance(record.exc_info[1], OURS):
        record.exc_info = None
    return True
