"""Limits how many stages of a kind run at once in a yard: `[limits]` of a profile.

Prefect's server counts the slots of a limit, so that flows on all machines share them and
`prefect gcl` changes them. A stage takes its slot when its task begins, with a lease that is
renewed until the task ends. When its flow is killed, the lease expires and the slot is free again.

The stage takes the slot itself, because Prefect's engine would wait without a log line, ignore
signals meanwhile, and lose a lease for good after some minutes without the server.

A server that keeps leases in memory, Prefect's default, forgets them when it restarts. Their slots
stay in use until a person frees them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from uuid import UUID

from httpx import HTTPStatusError
from prefect import runtime
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import ConcurrencyLeaseHolder
from prefect.exceptions import ObjectNotFound

from flows.logs.console import Log, headline
from flows.runner.wait_state import SLOT, wait_state
from flows.server.ephemeral import LEASE_SECONDS
from trainyard.artifacts.urls import show_url

LOOK_SECONDS = 3.0
"""Between two tries to take a slot."""
RENEW_SECONDS = 10.0
"""Between two renewals. A restarted server keeps every lease for `LEASE_SECONDS`."""
AGAIN_SECONDS = 1.0
"""After a renewal that failed."""
ANSWER_SECONDS = 10.0
"""Limit of one renewal. Prefect's client alone would retry with pauses of up to a minute."""
REPEAT_SECONDS = 600.0
"""Between two log lines of a stage that still waits."""
LOST_SECONDS = 30.0
"""A slot without a lease for this long is lost: the server frees those of expired leases every
15 s."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The slots of one limit, at one moment."""

    name: str
    """The limit's name for `prefect gcl`."""
    total: int
    taken: int
    holders: tuple[UUID, ...]
    """Task runs with a lease."""

    @property
    def are_full(self) -> bool:
        """Whether the next stage has to wait."""
        return self.taken >= self.total

    @property
    def unleased(self) -> int:
        """Used slots without a lease. For a moment this includes slots that pass from one task to
        another, and those whose lease just expired."""
        return max(0, self.taken - len(self.holders))

    @property
    def counts(self) -> str:
        """The number of used slots and of all, for a message."""
        return f"{self.taken} of {self.total} slots of {self.name} in use"

    @property
    def free_command(self) -> str:
        """The command that frees the slots without a lease."""
        return f"prefect gcl update {self.name} --active-slots {len(self.holders)}"


async def read_slots(client: PrefectClient, tag: str) -> Slots | None:
    """The slots of the limit on a tag; None if it does not exist or is switched off."""
    name = f"tag:{tag}"
    try:
        limit = await client.read_global_concurrency_limit_by_name(name)
        if not limit.active:
            return None
        holders = (await client.read_concurrency_limit_by_tag(tag)).active_slots
    except ObjectNotFound:
        return None
    return Slots(name=name, total=limit.limit, taken=limit.active_slots, holders=tuple(holders))


async def describe_task_runs(client: PrefectClient, task_runs: tuple[UUID, ...]) -> str:
    """The names of task runs, with those of their flow runs."""
    return ", ".join([await _describe(client, task_run) for task_run in task_runs])


async def _describe(client: PrefectClient, task_run: UUID) -> str:
    try:
        task = await client.read_task_run(task_run)
        if task.flow_run_id is None:
            return task.name
        flow = await client.read_flow_run(task.flow_run_id)
    except ObjectNotFound:  # the server learns of a task run some seconds after it began
        return f"task run {task_run}"
    return f"{task.name} of flow run {flow.name}"


class StageLimit:
    """The limit on a stage, for the jobs of one flow run."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.lock = asyncio.Lock()
        """Held while a job waits: one job of this flow run at a time asks for a slot."""

    @contextlib.asynccontextmanager
    async def apply(self, job: str, log: Log) -> AsyncIterator[None]:
        """Run one task inside: it waits in `take_slot`, and its slot is given back at the end."""
        slot = _Slot(self, job, log)
        _slot.set(slot)
        try:
            yield
        finally:
            await slot.give_back()


async def take_slot() -> None:
    """Wait, in a task under a limit, until it has a slot. It keeps the slot for all attempts."""
    if (slot := _slot.get()) is not None and (task_run := runtime.task_run.id) is not None:
        await slot.take(UUID(str(task_run)))


class _Slot:
    """The slot of one job: waited for, renewed, given back."""

    def __init__(self, limit: StageLimit, job: str, log: Log) -> None:
        self._limit, self._job, self._log = limit, job, log
        self._task_run: UUID | None = None
        self._lease: UUID | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._logged_at = -math.inf
        self._lost_since = math.inf
        self._logged_lost = False
        self._logged_retake = False

    async def take(self, task_run: UUID) -> None:
        """Wait for a slot; returns at once in attempts after the first."""
        if self._renewing is not None:
            return
        self._task_run = task_run
        async with self._limit.lock, get_client() as client:
            while True:
                slots = await read_slots(client, self._limit.tag)
                if slots is None or (not slots.are_full and await self._lease_slot(client)):
                    break
                if slots.are_full:
                    await self._report_wait(client, slots)
                await asyncio.sleep(LOOK_SECONDS)
        wait_state().end_wait(self._job)
        self._renewing = asyncio.create_task(self._renew_forever())

    async def give_back(self) -> None:
        """Stop renewing and release the slot. A slot that cannot be released expires."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait([self._renewing])
        if self._lease is None:
            return
        try:
            async with asyncio.timeout(ANSWER_SECONDS), get_client() as client:
                await client.release_concurrency_slots_with_lease(self._lease)
        except Exception as error:  # the stage has ended all the same
            tag = self._limit.tag
            self._log.warning("%s: its slot of %s was not given back: %s", self._job, tag, error)

    async def _lease_slot(self, client: PrefectClient) -> bool:
        """Take a slot; False if all are in use."""
        assert self._task_run is not None
        holder = ConcurrencyLeaseHolder(type="task_run", id=self._task_run)
        try:
            answer = await client.increment_concurrency_slots_with_lease(
                [f"tag:{self._limit.tag}"], 1, "concurrency", LEASE_SECONDS, holder
            )
        except HTTPStatusError as error:
            if error.response.status_code != HTTPStatus.LOCKED:
                raise
            return False
        self._lease = UUID(answer.json()["lease_id"])
        return True

    async def _renew_forever(self) -> None:
        pause = RENEW_SECONDS
        while True:
            await asyncio.sleep(pause)
            try:
                async with asyncio.timeout(ANSWER_SECONDS), get_client() as client:
                    await self._renew(client)
                pause = RENEW_SECONDS
            except Exception as error:  # the next try may succeed
                log.debug("the slot of %s was not renewed: %s", self._job, error)
                pause = AGAIN_SECONDS

    async def _renew(self, client: PrefectClient) -> None:
        """Renew the lease. Take a slot again if the server no longer knows the lease, or if the
        limit was registered after the stage began."""
        if self._lease is not None:
            try:
                await client.renew_concurrency_lease(self._lease, LEASE_SECONDS)
                return
            except HTTPStatusError as error:
                if error.response.status_code != HTTPStatus.GONE:
                    raise
        slots = await read_slots(client, self._limit.tag)
        if slots is None or self._task_run in slots.holders:
            return
        was_lost = self._lease is not None
        is_taken = await self._lease_slot(client)
        if was_lost and not self._logged_retake:
            self._logged_retake = True
            outcome = "another job holds the slot, so one job more than the limit may run"
            note = f"that of tag:{self._limit.tag} was lost while the server could not be reached, "
            note += "and taken again" if is_taken else f"and {outcome}"
            headline(self._log, self._job, "slot", note=note, level=logging.WARNING)

    async def _report_wait(self, client: PrefectClient, slots: Slots) -> None:
        """Log who has the slots, if that is new or was logged long ago."""
        now = time.monotonic()
        self._lost_since = min(self._lost_since, now) if slots.unleased else math.inf
        is_lost = now - self._lost_since >= LOST_SECONDS
        if now - self._logged_at < REPEAT_SECONDS and is_lost <= self._logged_lost:
            return
        self._logged_at, self._logged_lost = now, is_lost
        note = [slots.counts]
        if slots.holders:
            note.append(
                f"by {await describe_task_runs(client, slots.holders)}; a run that was killed "
                f"gives its slot back within {LEASE_SECONDS} s"
            )
        if is_lost:
            note.append(
                f"{slots.unleased} by no run that the server knows of. If none of them runs any "
                f"more: PREFECT_API_URL={show_url(str(client.api_url))} {slots.free_command}"
            )
        if slots.total == 0:
            note.append(f"so none may run; prefect gcl update {slots.name} --limit 1 lets one")
        wait_state().wait(self._job, SLOT, ", ".join(note))
        headline(self._log, self._job, "waits", note=", ".join(note))


_slot: ContextVar[_Slot | None] = ContextVar("slot", default=None)
