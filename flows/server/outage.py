"""Keeps Prefect's background loops alive, without tracebacks, while its server does not answer.

A worker has several such loops; a flow run has one, which listens for its suspension."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Coroutine, Iterable
from http import HTTPStatus
from types import ModuleType
from typing import Any

import httpx
from prefect._internal import observers
from prefect.settings import PREFECT_API_URL
from prefect.utilities import services

from trainyard.artifacts.urls import show_url

LISTENERS = ("prefect.FlowRunCancellingObserver", "prefect.FlowRunSuspendingObserver")
"""Loggers of listeners to events, which start polling when the server is away."""

Workload = Callable[..., Coroutine[Any, Any, Any]]


class Outage:
    """The time in which the server does not answer."""

    def __init__(self, report: Callable[[str], None]) -> None:
        """report: gets one line when it begins, and one when it ends."""
        self._report = report
        self._since: float | None = None

    def begin(self) -> None:
        """The server did not answer."""
        if self._since is None:
            self._since = time.monotonic()
            server = show_url(str(PREFECT_API_URL.value()))
            self._report(
                f"Prefect's server at {server} does not answer; trying again until it does. Flow "
                "runs that have begun continue"
            )

    def end(self) -> None:
        """The server answered."""
        if self._since is not None:
            seconds, self._since = time.monotonic() - self._since, None
            self._report(f"Prefect's server answers again after {seconds:.0f} s")

    def tolerant(self, workload: Workload) -> Workload:
        """The work of one turn of a loop, which an outage does not fail."""

        async def run() -> None:
            try:
                await workload()
            except httpx.TransportError:
                self.begin()
            except httpx.HTTPStatusError as error:
                if error.response.status_code < HTTPStatus.INTERNAL_SERVER_ERROR:
                    raise
                self.begin()
            else:
                self.end()

        return run


def without_traceback(record: logging.LogRecord) -> bool:
    """A logging filter that drops why a listener started polling."""
    return not record.exc_info


def print_line(line: str) -> None:
    """Print a line with the time to stderr."""
    print(f"{time.strftime('%H:%M:%S')}  {line}", file=sys.stderr, flush=True)


def tolerate_outages(
    report: Callable[[str], None] = lambda line: None, modules: Iterable[ModuleType] = (observers,)
) -> None:
    """Change the loops of these modules of Prefect in this program."""
    outage, loop = Outage(report), services.critical_service_loop

    def tolerant_loop(workload: Workload, *args: Any, **options: Any) -> Coroutine[Any, Any, None]:
        return loop(outage.tolerant(workload), *args, **options)

    for module in modules:
        setattr(module, "critical_service_loop", tolerant_loop)  # noqa: B010
    for name in LISTENERS:
        logging.getLogger(name).addFilter(without_traceback)
