"""A flow as a program: Prefect's environment, its API, a quiet console, an exit status.

Nothing here imports Prefect at the top, since it reads its environment when it is imported."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from flows.launch.outcome import StageError
from flows.local_api import LocalApi
from trainyard.errors import EXIT_DEFECT, InfrastructureError, TrainyardError

ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}

PATIENCE = {"PREFECT_CLIENT_RETRY_EXTRA_CODES": "500", "PREFECT_CLIENT_MAX_RETRIES": "6"}
"""What makes a flow wait two minutes for a server whose database is away, and which then answers
500 where its client expects 503."""

DRAIN_SECONDS = 5.0

Flow = Callable[..., Coroutine[Any, Any, Any]]

_alone = threading.Event()


def is_alone() -> bool:
    """True when the flow's server is our own, which starts nothing and ends with the flow."""
    return _alone.is_set()


def run_program(
    load: Callable[[], Flow], home: Path, verbose: bool, **parameters: Any
) -> tuple[int, Any]:
    """Run a flow against the server that PREFECT_API_URL names, else one of our own.

    Returns its exit status, and what the flow returned when that is 0. `load` imports the flow;
    `home` is Prefect's folder when the server is ours."""
    for key, value in (ENVIRONMENT | PATIENCE).items():
        os.environ.setdefault(key, value)
    own = None if os.environ.get("PREFECT_API_URL") else LocalApi(home.absolute())
    try:
        if own is not None:
            _alone.set()
            os.environ.update(PREFECT_API_URL=own.url, PREFECT_HOME=str(home.absolute()))
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
    """Say what was wrong, in words; returns the exit status of its class."""
    print(f"error: {error}", file=sys.stderr)
    if isinstance(error, StageError) and error.log:
        print(f"       its log: {error.log}", file=sys.stderr)
    return error.exit_status


def _run(flow: Flow, verbose: bool, parameters: dict[str, Any]) -> tuple[int, Any]:
    from prefect.exceptions import PrefectException, TerminationSignal

    from flows.console import take_over
    from flows.interrupt import interrupted

    take_over(verbose)
    try:
        return 0, asyncio.run(flow(**parameters))
    except (TrainyardError, StageError) as error:
        return _stopped(signal.SIGINT) if interrupted() else fail(error), None
    except KeyboardInterrupt:
        return _stopped(signal.SIGINT), None
    except (TerminationSignal, asyncio.CancelledError):
        return _stopped(signal.SIGINT if interrupted() else signal.SIGTERM), None
    except Exception as error:
        if isinstance(error, PrefectException) or is_of_network(error):
            url = os.environ["PREFECT_API_URL"]
            return fail(InfrastructureError(f"Prefect's API at {url}: {error}")), None
        traceback.print_exception(error)
        print("error: this is a defect of trainyard", file=sys.stderr)
        return EXIT_DEFECT, None
    finally:
        _drain()


def _drain() -> None:
    """Let Prefect send off what it still has to say, before its server ends."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all(timeout=DRAIN_SECONDS)
    EventsWorker.drain_all(timeout=DRAIN_SECONDS)


def is_of_network(error: BaseException | None) -> bool:
    """True when Prefect's client could not talk to its server, however it put that."""
    while error is not None:
        if type(error).__module__.partition(".")[0] in ("httpx", "httpcore"):
            return True
        error = error.__cause__ or error.__context__
    return False


def _stopped(number: signal.Signals) -> int:
    print(f"stopped by {number.name}; run it again to go on from here", file=sys.stderr)
    return 128 + number
