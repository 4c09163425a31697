"""The slots of a flow run, kept for as long as their stages run.

Prefect renews a slot's lease as well, and gives that up for good when the server was away for some
minutes; the training goes on, and its slot is the next one's. Here it is renewed as soon as the
server answers. Where the lease is gone, the slot is taken again."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from http import HTTPStatus
from uuid import UUID

from httpx import HTTPStatusError
from prefect import runtime
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import ConcurrencyLeaseHolder
from prefect.concurrency.context import ConcurrencyContext

from flows.logs.console import Log, headline
from flows.runner.limits import slots_of
from flows.server.ephemeral import LEASE_SECONDS

RENEW_SECONDS = 10.0
"""Between two renewals: after it was away, the server leaves a lease for `LEASE_SECONDS`."""
ANSWER_SECONDS = 10.0
"""Within which the server answers; its client would try again with pauses of up to a minute."""
AGAIN_SECONDS = 1.0
"""After a try that found no server."""

debug = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Held:
    """A slot that Prefect took for a task run."""

    task_run: UUID
    leases: tuple[UUID, ...]


def held() -> Held | None:
    """The slot of the task run that calls this; None outside of one."""
    if (task_run := runtime.task_run.id) is None:
        return None
    attempt = ConcurrencyContext.get()
    token = None if attempt is None else attempt._token
    # Around the context of an attempt is that of the task run, which took the slot. Where another
    # Prefect has it otherwise nothing is renewed here, and what is lost is taken again.
    around = None if token is None else token.old_value
    leases = around.cleanup_lease_ids if isinstance(around, ConcurrencyContext) else []
    return Held(UUID(str(task_run)), tuple(leases))


class Keeper:
    """Keeps the slot of one stage."""

    def __init__(self, tag: str, held: Held, job: str, log: Log) -> None:
        self._tag = tag
        self._holder = ConcurrencyLeaseHolder(type="task_run", id=held.task_run)
        self._leases = list(held.leases)
        self._job = job
        self._log = log
        self._again: UUID | None = None
        self._is_told = False

    async def keep(self) -> None:
        """Until it is cancelled, which gives back what was taken here."""
        try:
            pause = RENEW_SECONDS
            while True:
                await asyncio.sleep(pause)
                try:
                    async with asyncio.timeout(ANSWER_SECONDS), get_client() as client:
                        await self._renew(client)
                    pause = RENEW_SECONDS
                except Exception as error:  # whatever it is, the next try may find the server well
                    debug.debug("the slot of %s was not renewed: %s", self._job, error)
                    pause = AGAIN_SECONDS
        finally:
            if self._again is not None:
                async with asyncio.timeout(ANSWER_SECONDS), get_client() as client:
                    await client.release_concurrency_slots_with_lease(self._again)

    async def _renew(self, client: PrefectClient) -> None:
        if self._leases and all([await _renewed(client, lease) for lease in self._leases]):
            return
        slots = await slots_of(client, self._tag)
        if slots is not None and self._holder.id not in slots.holders:
            await self._take(client)

    async def _take(self, client: PrefectClient) -> None:
        """Take a slot again, if there is one; says once how it went."""
        try:
            answer = await client.increment_concurrency_slots_with_lease(
                [f"tag:{self._tag}"], 1, "concurrency", LEASE_SECONDS, self._holder
            )
        except HTTPStatusError as error:
            if error.response.status_code != HTTPStatus.LOCKED:
                raise
            self._tell("and another has it: for once one more may run than the limit says")
            return
        self._again = UUID(answer.json()["lease_id"])
        self._leases = [self._again]
        self._tell("and taken again")

    def _tell(self, what: str) -> None:
        if not self._is_told:
            self._is_told = True
            note = f"that of tag:{self._tag} was lost while the server could not be reached, {what}"
            headline(self._log, self._job, "slot", note=note, level=logging.WARNING)


async def _renewed(client: PrefectClient, lease: UUID) -> bool:
    """False where the server knows no such lease any more."""
    try:
        await client.renew_concurrency_lease(lease, LEASE_SECONDS)
    except HTTPStatusError as error:
        if error.response.status_code != HTTPStatus.GONE:
            raise
        return False
    return True
