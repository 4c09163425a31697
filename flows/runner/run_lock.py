"""One flow run at a time on one root: a second run of the same recipe waits for the first.

The claims of outputs alone would keep two runs apart stage by stage. But the training of the second
run would then wait inside the nodes that it was given.

The lock is a claim beside the artifacts, so it works between laptops and servers. A waiting run
takes over the lock of a run that is gone (trainyard.artifacts.claim). Beside the lock lie the jobs
of the run, so that a sweep (flows.gc) spares what a stage will read that waits for its slot."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from flows.logs.console import Log, headline
from trainyard.artifacts import retry, store
from trainyard.artifacts.claim import Claim, acquire
from trainyard.artifacts.urls import join
from trainyard.errors import TrainyardError

TURN = ".flow.claim.json"
"""The lock, in the root of a recipe."""

JOBS = ".flow.jobs.json"
"""Options of the stages of the run that has the lock; meaningless without it."""

SILENT_SECONDS = 2.0
FOREVER = 10.0 * 365 * 86400


@contextlib.asynccontextmanager
async def run_lock(root: str, log: Log) -> AsyncIterator[None]:
    """Hold the lock of a root; logs if it has to wait for another run."""
    asked = _acquire(join(root, TURN))
    waiting = asyncio.wrap_future(asked)
    try:
        await asyncio.wait([waiting], timeout=SILENT_SECONDS)
        if not waiting.done():
            headline(log, "turn", "waits", note=f"another flow run works on {root}")
        claim = await waiting
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


def _acquire(url: str) -> Future[Claim]:
    """Ask for a claim in a thread. A daemon: a flow that is cancelled while it waits ends without
    it."""
    asked: Future[Claim] = Future()
    asked.set_running_or_notify_cancel()  # so nothing cancels it, and its claim is always released

    def ask() -> None:
        try:
            asked.set_result(acquire(url, FOREVER))
        except Exception as error:
            asked.set_exception(error)

    threading.Thread(target=ask, name="run lock", daemon=True).start()
    return asked


def _release(asked: Future[Claim]) -> None:
    if asked.exception() is None:
        asked.result().release()
