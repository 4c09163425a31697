"""Lets one flow run at a time work on a root: a second run of the same recipe waits for the first.

The claims of outputs alone would separate two runs stage by stage. But then the training of the
second run would wait with its nodes allocated.

The lock is a claim beside the artifacts, so it works between laptops and servers. A waiting run
takes over the lock of a run that died (trainyard.artifacts.claim). The run writes its jobs beside
the lock, so that a sweep (flows.gc) keeps the inputs of stages that wait for a slot."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from flows.logs.console import Log, headline
from flows.runner.wait_state import LOCK, wait_state
from trainyard.artifacts import retry, store
from trainyard.artifacts.claim import Claim, acquire
from trainyard.artifacts.urls import join
from trainyard.errors import TrainyardError

LOCK_FILE = ".flow.claim.json"
"""File of the lock, in the root of a recipe."""

JOBS = ".flow.jobs.json"
"""File with the options of the stages of the run that has the lock; stale without a lock."""

FOREVER = 10.0 * 365 * 86400


@contextlib.asynccontextmanager
async def run_lock(root: str, log: Log) -> AsyncIterator[None]:
    """Hold the lock of a root; logs a line if it has to wait for another run, and shows that."""
    loop, waits = asyncio.get_running_loop(), wait_state()

    def on_wait(holder: str) -> None:
        why = f"another flow run works on {root}: {holder}"
        headline(log, "lock", "waits", note=why)
        loop.call_soon_threadsafe(waits.wait, "lock", LOCK, why)

    asked = _acquire(join(root, LOCK_FILE), on_wait)
    try:
        claim = await asyncio.wrap_future(asked)
        waits.end_wait("lock")
    except BaseException:
        asked.add_done_callback(_release)
        raise
    try:
        yield
    finally:
        with contextlib.suppress(TrainyardError), retry.no_retry():
            store.delete(join(root, JOBS))
        claim.release()


def record_jobs(root: str, documents: Sequence[Mapping[str, Any]]) -> None:
    """Write the options of the jobs of the run that has the lock."""
    store.write_bytes(join(root, JOBS), json.dumps(documents).encode())


def _acquire(url: str, on_wait: Callable[[str], None]) -> Future[Claim]:
    """Request a claim in a thread: a daemon, so that it does not delay the end of a flow that is
    cancelled while it waits."""
    asked: Future[Claim] = Future()
    asked.set_running_or_notify_cancel()  # cannot be cancelled now, so its claim is always released

    def ask() -> None:
        try:
            asked.set_result(acquire(url, FOREVER, on_wait))
        except Exception as error:
            asked.set_exception(error)

    threading.Thread(target=ask, name="run lock", daemon=True).start()
    return asked


def _release(asked: Future[Claim]) -> None:
    if asked.exception() is None:
        asked.result().release()
