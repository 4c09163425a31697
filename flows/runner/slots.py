"""A stage that waits for a slot of its limit, and says so.

Prefect's engine would wait by itself: without a word, and deaf to a signal, since a program that
ends meanwhile goes on asking. So a stage is handed to it when a slot is seen to be free, one stage
of a flow run at a time. Where another run was quicker the engine waits after all; that is told as
well."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from contextvars import ContextVar

from prefect.client.orchestration import PrefectClient, get_client

from flows.logs.console import Log, headline
from flows.runner.limits import Slots, slots_of, told
from flows.runner.slot_kept import Held, Keeper, held
from flows.server.ephemeral import LEASE_SECONDS

LOOK_SECONDS = 3.0
"""Between two looks at a limit."""
START_SECONDS = 10.0
"""Within which a task has begun that found a slot."""
AGAIN_SECONDS = 600.0
"""After which a stage that still waits says so again."""
LOST_SECONDS = 30.0
"""A slot without a lease for so long is nobody's: the server takes back those of leases that have
run out every 15 s."""


class _Begun(asyncio.Event):
    """That a task has its slot."""

    held: Held | None = None


_begun: ContextVar[_Begun | None] = ContextVar("begun", default=None)


def note_begin() -> None:
    """Within a task: it has its slot."""
    if (begun := _begun.get()) is not None:
        begun.held = held()
        begun.set()


class StageLimit:
    """The way to the slots of one limit, for the stages of one flow run."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def passed(self, job: str, log: Log) -> AsyncIterator[None]:
        """Wait until a slot is free; within, the task is run that takes it, and which keeps it."""
        waiting, begun = _Waiting(self._tag, job, log), _Begun()
        await self._turn.acquire()
        try:
            await waiting.until_free()
        except BaseException:
            self._turn.release()
            raise
        watching = asyncio.create_task(waiting.until_begun(begun))
        watching.add_done_callback(lambda _: self._turn.release())
        keeping = asyncio.create_task(self._keep(begun, job, log))
        _begun.set(begun)
        try:
            yield
        finally:
            watching.cancel()  # of a task that never began
            keeping.cancel()
            await asyncio.wait([watching, keeping])
            if not watching.cancelled() and (error := watching.exception()):
                log.warning("%s: who has the slots of %s is not known: %s", job, self._tag, error)
            if not keeping.cancelled() and (error := keeping.exception()):
                log.warning("%s: its slot of %s was not given back: %s", job, self._tag, error)

    async def _keep(self, begun: _Begun, job: str, log: Log) -> None:
        await begun.wait()
        if begun.held is not None:
            await Keeper(self._tag, begun.held, job, log).keep()


class _Waiting:
    """One stage, and what was said of its waiting."""

    def __init__(self, tag: str, job: str, log: Log) -> None:
        self._tag = tag
        self._job = job
        self._log = log
        self._told_at = -math.inf
        self._lost_since = math.inf
        self._told_lost = False

    async def until_free(self) -> None:
        """Look until a slot is free."""
        async with get_client() as client:
            while await self._look(client):
                await asyncio.sleep(LOOK_SECONDS)

    async def until_begun(self, begun: _Begun) -> None:
        """Look while Prefect's engine waits."""
        while not begun.is_set():
            try:
                await asyncio.wait_for(begun.wait(), START_SECONDS)
            except TimeoutError:
                async with get_client() as client:
                    await self._look(client)

    async def _look(self, client: PrefectClient) -> bool:
        """True where all slots are taken; says so when it is new, or long ago that it was said."""
        slots = await slots_of(client, self._tag)
        if slots is None or not slots.are_full:
            return False
        now = time.monotonic()
        self._lost_since = min(self._lost_since, now) if slots.unleased else math.inf
        is_lost = now - self._lost_since >= LOST_SECONDS
        if now - self._told_at >= AGAIN_SECONDS or is_lost > self._told_lost:
            self._told_at, self._told_lost = now, is_lost
            headline(self._log, self._job, "waits", note=await _note(client, slots, is_lost))
        return True


async def _note(client: PrefectClient, slots: Slots, is_lost: bool) -> str:
    """Who has the slots, and what to do."""
    said = [slots.counted]
    if slots.holders:
        said.append(
            f"by {await told(client, slots.holders)}; a run that was killed gives its slot back "
            f"within {LEASE_SECONDS} s"
        )
    if is_lost:
        said.append(
            f"{slots.unleased} by no run that the server knows of. If none of them runs any more: "
            f"PREFECT_API_URL={client.api_url} {slots.freeing}"
        )
    if slots.most == 0:
        said.append(f"nobody may run; prefect gcl update {slots.name} --limit 1 lets one")
    return ", ".join(said)
