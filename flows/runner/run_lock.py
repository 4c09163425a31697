"""One flow run at a time on one root: a second run of the same recipe waits for the first.

Without this, two would be kept apart stage by stage, by the claims of outputs: correct, but the
second one's training would wait inside the nodes that it was given. The turn is a claim of its own
beside the artifacts, so it holds between laptops and servers alike; that of a run that is gone is
taken over (trainyard.artifacts.claim). Beside it lies what the run is going to do, so that a sweep
(flows.gc) spares what a stage will read that waits for its slot."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from flows.logs.console import Log, headline
from trainyard.artifacts import retry, store
from trainyard.artifacts.claim import Claim, acquire
from trainyard.artifacts.urls import join
from trainyard.errors import TrainyardError

TURN = ".flow.claim.json"
"""Beside what a recipe makes, while a flow run works on it."""

JOBS = ".flow.jobs.json"
"""Options of the stages of that run; of no meaning without its claim."""

SILENT_SECONDS = 2.0
FOREVER = 10.0 * 365 * 86400


@contextlib.asynccontextmanager
async def run_lock(root: str, log: Log) -> AsyncIterator[None]:
    """Hold the turn of a root; waits as long as another run has it, and says so."""
    waiting = _Waiting(join(root, TURN))
    try:
        if not await waiting.comes_within(SILENT_SECONDS):
            headline(log, "turn", "waits", note=f"another flow run works on {root}")
        claim = await waiting.claim()
    except BaseException:
        waiting.give_up()
        raise
    try:
        yield
    finally:
        with contextlib.suppress(TrainyardError), retry.no_retry():
            store.delete(join(root, JOBS))
        claim.release()


def note_jobs(root: str, documents: Sequence[Mapping[str, Any]]) -> None:
    """Write down what the run that has the turn is going to do."""
    store.write_bytes(join(root, JOBS), json.dumps(documents).encode())


class _Waiting:
    """A thread that asks for a claim, which nothing can cancel, and what came of it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._loop = asyncio.get_running_loop()
        self._found: asyncio.Future[Claim] = self._loop.create_future()
        self._is_given_up = False
        self._lock = threading.Lock()
        # A daemon: a flow that is cancelled while it waits ends without it.
        threading.Thread(target=self._ask, name="turn", daemon=True).start()

    def _ask(self) -> None:
        try:
            claim = acquire(self._url, FOREVER)
        except Exception as error:
            self._deliver(None, error)
        else:
            self._deliver(claim, None)

    def _deliver(self, claim: Claim | None, error: Exception | None) -> None:
        with self._lock:
            if not self._is_given_up:
                self._loop.call_soon_threadsafe(self._settle, claim, error)
                return
        if claim is not None:
            claim.release()

    def _settle(self, claim: Claim | None, error: Exception | None) -> None:
        if self._found.cancelled():
            if claim is not None:
                claim.release()
        elif claim is not None:
            self._found.set_result(claim)
        elif error is not None:
            self._found.set_exception(error)

    async def comes_within(self, seconds: float) -> bool:
        """True when it is there, or has failed, by then."""
        await asyncio.wait([self._found], timeout=seconds)
        return self._found.done()

    async def claim(self) -> Claim:
        """The claim, as soon as it is ours."""
        return await self._found

    def give_up(self) -> None:
        """Whatever comes of it now is let go again."""
        with self._lock:
            self._is_given_up = True
        if self._found.done() and not self._found.cancelled() and not self._found.exception():
            self._found.result().release()
        self._found.cancel()
