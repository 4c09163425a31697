"""Runs a flow as a program: Prefect's environment, its API, a quiet console, an exit status.

This module does not import Prefect at the top, because Prefect reads its environment on import."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

from flows.backends.outcome import StageError
from flows.server.ephemeral import EphemeralServer, alone
from flows.server.home import PASSWORD
from trainyard.artifacts.urls import show_url
from trainyard.errors import EXIT_DEFECT, ConfigError, InfrastructureError, TrainyardError
from trainyard.logging import printable, shortened

ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}

PATIENCE = {"PREFECT_CLIENT_RETRY_EXTRA_CODES": "500", "PREFECT_CLIENT_MAX_RETRIES": "6"}
"""Makes a flow wait two minutes for a server whose database is unavailable. Such a server answers
500, where Prefect's client expects 503."""

DRAIN_SECONDS = 5.0

REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)

Flow = Callable[..., Coroutine[Any, Any, Any]]


def run_program(
    load: Callable[[], Flow], home: Path, verbose: bool, **parameters: Any
) -> tuple[int, Any]:
    """Run a flow with the server of PREFECT_API_URL, else with a server of our own.

    Returns its exit status, and the flow's result if that is 0. `load` imports the flow; `home` is
    Prefect's folder if the server is ours."""
    for key, value in (ENVIRONMENT | PATIENCE).items():
        os.environ.setdefault(key, value)
    own = None
    try:
        if not os.environ.get("PREFECT_API_URL"):
            own = EphemeralServer(home.absolute())
            alone.set()
            os.environ.update({**own.environment, "PREFECT_HOME": str(home.absolute())})
        flow = load()  # two seconds of imports, while the server starts
        if own is not None:
            own.wait()
        return _run(flow, verbose, parameters)
    except TrainyardError as error:
        return fail(error), None
    finally:
        if own is not None:
            own.stop()


def fail(error: TrainyardError | StageError) -> int:
    """Print an error; returns the exit status of its class."""
    print(printable(f"error: {shortened(str(error))}"), file=sys.stderr)
    if isinstance(error, StageError) and error.log:
        what = "its log" if error.log.endswith(".txt") else "submitted"
        print(printable(f"       {what}: {error.log}"), file=sys.stderr)
    return error.exit_status


def _run(flow: Flow, verbose: bool, parameters: dict[str, Any]) -> tuple[int, Any]:
    from prefect.exceptions import CancelledRun, TerminationSignal

    from flows.logs.console import take_over
    from flows.runner.cancellation import exit_after_signal, received_signal

    take_over(verbose)
    exit_after_signal()
    try:
        return 0, asyncio.run(flow(**parameters))
    except (TrainyardError, StageError) as error:
        return _stopped(number) if (number := received_signal()) else fail(error), None
    except KeyboardInterrupt:
        return _stopped(signal.SIGINT), None
    except (TerminationSignal, asyncio.CancelledError):
        return _stopped(received_signal() or signal.SIGTERM), None
    except CancelledRun:
        return _stopped(received_signal() or signal.SIGTERM, "cancelled in Prefect"), None
    except Exception as error:
        if (ours := of_server(error)) is not None:
            status = fail(ours)
            return _stopped(number) if (number := received_signal()) else status, None
        traceback.print_exception(error)
        print("error: this is a defect of trainyard", file=sys.stderr)
        return EXIT_DEFECT, None
    finally:
        _drain()


def _drain() -> None:
    """Let Prefect send its pending logs and events before its server ends."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all(timeout=DRAIN_SECONDS)
    EventsWorker.drain_all(timeout=DRAIN_SECONDS)


def of_server(error: Exception) -> TrainyardError | None:
    """An error between Prefect's client and server, as an error of ours; None for other errors."""
    from httpx import HTTPStatusError
    from prefect.exceptions import PrefectException

    url = os.environ.get("PREFECT_API_URL", "")
    for one in _chain(error):
        if not isinstance(one, HTTPStatusError):
            continue
        status = one.response.status_code
        if status in REFUSED:
            return ConfigError(
                f"{show_url(url)} refuses: {status}; set {PASSWORD} to USER:PASSWORD, as the "
                f"server has it (for that of `make ui`: `. yard/.prefect/ui.env`)"
            )
    if isinstance(error, PrefectException) or _is_of_network(error):
        words = str(error).replace(url, show_url(url)) if url else str(error)
        return InfrastructureError(f"Prefect's API at {show_url(url)}: {words}")
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_of_network(error: BaseException) -> bool:
    """Whether an error, of any class of Prefect's client, means that the server is unreachable."""
    modules = {type(one).__module__.partition(".")[0] for one in _chain(error)}
    return not modules.isdisjoint(("httpx", "httpcore"))


def _stopped(number: signal.Signals, how: str = "") -> int:
    from flows.runner.cancellation import how_to_resume

    print(f"{how or f'stopped by {number.name}'}; {how_to_resume()}", file=sys.stderr)
    return 128 + number
