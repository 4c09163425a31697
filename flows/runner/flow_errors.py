"""Makes a failed flow run show an error message as its state, on a page and in its name, without a
traceback in its log.

Prefect treats an exception that leaves a flow as a defect of the flow. Our own errors are messages
for a person instead. All other exceptions keep their traceback. Lines of Prefect that say less or
other than ours do are left out."""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ParamSpec, TypeVar, cast

from prefect.states import Failed

from flows.backends.outcome import StageError
from flows.pages.run_pages import show_failure
from flows.pages.stage_pages import shown
from flows.runner.cancellation import run_until_cancelled
from flows.runner.heartbeats import end_heartbeats
from flows.runner.run_name import add_reason
from trainyard.artifacts.urls import hold_credentials
from trainyard.errors import ConfigError, TrainyardError
from trainyard.logging import printable, shortened

P = ParamSpec("P")
R = TypeVar("R")

OURS = (TrainyardError, StageError)

LOGGERS = ("prefect.task_runs", "prefect.flow_runs", "prefect.engine")
"""Prefect's loggers of exceptions: of a failed task, of a flow, and of a program whose flow failed.
"""

LEFT_OUT = re.compile(
    r"Task run failed with .* - Retry \d+/\d+ will start immediately$"  # it begins with our pause
    r"|Crash detected! Execution was "  # it was stopped
    r"|Finished in state (Running\(\)|Crashed\('Execution was cancelled)",
    re.DOTALL,
)
"""Prefect's lines of a retry and of a stopped run, beside our own."""


def report_errors(
    run: Callable[P, Coroutine[Any, Any, R]],
) -> Callable[P, Coroutine[Any, Any, R]]:
    """Make a flow end as Failed with the message of an error of ours, and as Cancelled when its run
    is cancelled in Prefect. The caller of the flow still gets the error itself."""

    @functools.wraps(run)
    async def reporting(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in LOGGERS:
            logging.getLogger(name).addFilter(filter_line)
        try:
            refuse_credentials(signature.bind(*args, **kwargs).arguments)
            result = await run_until_cancelled(run(*args, **kwargs))
            await end_heartbeats()
            return result
        except OURS as error:
            await show_failure(error)
            await shown(add_reason(error))
            await end_heartbeats()
            # A state that a flow returns becomes the state of its run.
            return cast(R, Failed(message=printable(shortened(str(error))), data=error))

    # Prefect would look for the names of types in this module, not in that of the flow.
    signature = inspect.signature(run, eval_str=True)
    vars(reporting)["__signature__"] = signature
    return reporting


def refuse_credentials(parameters: Mapping[str, Any]) -> None:
    """Raise ConfigError for a parameter with a URL that has a user or a password."""
    for name, value in parameters.items():
        if hold_credentials(value):
            raise ConfigError(
                f"parameter {name} has a URL with a user or a password, which Prefect keeps with "
                f"the run: give credentials in the environment of the worker, delete this run "
                f"(prefect flow-run delete), and change the password"
            )


def filter_line(record: logging.LogRecord) -> bool:
    """A logging filter: removes the traceback of an error of ours, and lines of LEFT_OUT."""
    if record.exc_info and isinstance(record.exc_info[1], OURS):
        record.exc_info = None
    return LEFT_OUT.match(record.getMessage()) is None
