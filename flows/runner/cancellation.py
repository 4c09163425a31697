"""Stops a flow run with its jobs, after a signal or when it is cancelled in Prefect.

Prefect and asyncio alone lose some of these requests, and the training would run on:

- asyncio turns the first SIGINT into one cancellation of the flow, which a task may lose. So this
  module directly stops all jobs that nothing has stopped a few seconds later.
- A worker stops listening for cancelled runs once the server was unavailable for half a minute.
  A flow started by hand has no worker. So the flow itself polls the server for its state.
- Prefect's client retries for minutes to report the end of a flow to a server that answers with
  errors. A program that runs one flow exits `REPORT_SECONDS` after its last job ended."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar, cast
from uuid import UUID

from prefect import get_run_logger, runtime
from prefect.client.orchestration import get_client
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled

from flows.backends.live_jobs import live, stop_all

LOST_SECONDS = 3.0
"""By then a cancellation has reached every job, unless it was lost."""
REPORT_SECONDS = 15.0
"""How long a flow that a signal stopped may report its end to the server, without a running job."""
LOOK_SECONDS = 0.5

STATE_SECONDS = 5.0
"""Between two polls of the run's state."""
ANSWER_SECONDS = 10.0
"""Limit of one poll. Prefect's client alone would retry for minutes, and would see a cancelled run
too late once the server is back."""
AGAIN_SECONDS = 1.0
"""Until the next poll, after one that found no server."""

CANCELLED = "Cancelled in Prefect; its jobs were stopped."

R = TypeVar("R")

saved_steps: dict[str, int] = {}
"""The step that each training of this program saved when it was stopped, by job."""

log = logging.getLogger(__name__)


# --- signals ------------------------------------------------------------------------------------

_received: list[signal.Signals] = []
_exits = threading.Event()


def received_signal() -> signal.Signals | None:
    """The first signal that asked this program to stop; SIGTERM only after `exit_after_signal`."""
    return _received[0] if _received else None


def exit_after_signal() -> None:
    """Exit on a signal even if Prefect's server cannot be reached. For programs that run one flow
    and nothing else."""
    _exits.set()
    # From the start: a signal may come while the main thread is about to start another thread.
    threading.Thread(target=_exit_after_jobs, name="exit", daemon=True).start()


def watch_signals() -> None:
    """Stop the flow on signals as long as its loop runs. SIGINT is watched in the main thread."""
    loop, flow = asyncio.get_running_loop(), asyncio.current_task()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # Prefect's handler of SIGTERM raises wherever the program is. If that is a callback of the
        # loop, no task awaits the exception, and it arrives here.
        if flow is not None and isinstance(context.get("exception"), TerminationSignal):
            flow.cancel()
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
    if threading.current_thread() is not threading.main_thread():
        return

    def stop_later() -> None:
        loop.call_soon_threadsafe(loop.call_later, LOST_SECONDS, stop_all)

    _wrap(signal.SIGINT, stop_later)
    # A worker's runner asks whether the handler is Prefect's own, and before a flow there is none.
    if _exits.is_set() and callable(signal.getsignal(signal.SIGTERM)):
        _wrap(signal.SIGTERM, lambda: None)


def _wrap(number: signal.Signals, act: Callable[[], None]) -> None:
    """Call `act` before the current handler of a signal."""
    before = signal.getsignal(number)

    def handle(received: int, frame: FrameType | None) -> None:
        act()
        _received.append(number)
        if callable(before):
            before(received, frame)

    signal.signal(number, handle)


def _exit_after_jobs() -> None:
    while not _received:
        time.sleep(LOOK_SECONDS)
    number = _received[0]
    since = time.monotonic()
    while time.monotonic() - since < REPORT_SECONDS:
        time.sleep(LOOK_SECONDS)
        if not all(job.is_over for job in list(live)):
            since = time.monotonic()
    print(
        f"stopped by {number.name}, and Prefect's server did not answer within "
        f"{REPORT_SECONDS:.0f} s; {how_to_resume()}",
        file=sys.stderr,
        flush=True,
    )
    os._exit(128 + number)  # the thread that waits for the server cannot be stopped


def how_to_resume() -> str:
    """What a stopped flow kept, for the last line of its program."""
    steps = [f"{job} saved step {step:,}" for job, step in saved_steps.items()]
    return f"{' and '.join(steps) or 'finished stages are kept'}; run the same command to resume"


# --- cancelled in Prefect -----------------------------------------------------------------------


async def run_until_cancelled(run: Coroutine[Any, Any, R]) -> R:
    """Await a flow's function. If the run is cancelled in Prefect, cancel it as a SIGTERM would,
    and return the state Cancelled instead of its result."""
    flow, flow_run = asyncio.current_task(), runtime.flow_run.id
    if flow is None or not flow_run:
        return await run
    looking = asyncio.create_task(_wait_until_cancelled(UUID(str(flow_run))))

    def stop(done: asyncio.Task[None]) -> None:
        # Whether it saw the run cancelled or was itself ended by an exception, such as that of a
        # SIGTERM. A worker may have been quicker. Jobs not reached are stopped a little later.
        if not done.cancelled() and not flow.done() and not flow.cancelling():
            flow.cancel()
            flow.get_loop().call_later(LOST_SECONDS, stop_all)

    looking.add_done_callback(stop)
    try:
        return await run
    except (Exception, asyncio.CancelledError, TerminationSignal):
        if not looking.done() or looking.cancelled() or looking.exception() is not None:
            raise
        while flow.uncancel():
            pass
        return cast(R, Cancelled(message=CANCELLED))
    finally:
        looking.cancel()


async def _wait_until_cancelled(flow_run: UUID) -> None:
    """Poll the server until the run is cancelled."""
    while True:
        pause = STATE_SECONDS
        try:
            async with asyncio.timeout(ANSWER_SECONDS), get_client() as client:
                state = (await client.read_flow_run(flow_run)).state
        except Exception as error:  # the next poll may succeed
            log.debug("cannot read the state of flow run %s: %s", flow_run, error)
            pause = AGAIN_SECONDS
        else:
            if state is not None and (state.is_cancelling() or state.is_cancelled()):
                get_run_logger().info("cancelled in Prefect: stopping")
                return
        await asyncio.sleep(pause)
