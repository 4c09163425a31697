"""What a server knows of a limit: how many slots it has, how many are taken, and by whom.

Slots are counted in the server's database. Who has them is told by leases, which are renewed while
a task runs, and end a minute after it died without a word. A server that keeps leases in memory, as
Prefect does where nobody says otherwise, forgets them when it is started again: their slots stay
taken until somebody frees them."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.exceptions import ObjectNotFound


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The slots of one limit, as they are now."""

    name: str
    """Of the limit, as `prefect gcl` takes it."""
    most: int
    taken: int
    holders: tuple[UUID, ...]
    """Task runs that have a lease."""

    @property
    def are_full(self) -> bool:
        """True when the next one has to wait."""
        return self.taken >= self.most

    @property
    def unleased(self) -> int:
        """Taken, and held by nobody the server knows of. For an instant also those that change
        hands, and those of a lease that has just run out."""
        return max(0, self.taken - len(self.holders))

    @property
    def counted(self) -> str:
        """How many of how many are taken, in words."""
        return f"{self.taken} of {self.most} slots of {self.name} taken"

    @property
    def freeing(self) -> str:
        """The command that frees those that nobody has."""
        return f"prefect gcl update {self.name} --active-slots {len(self.holders)}"


async def slots_of(client: PrefectClient, tag: str) -> Slots | None:
    """The slots of the limit on a tag; None where there is none, or it is switched off."""
    name = f"tag:{tag}"
    try:
        limit = await client.read_global_concurrency_limit_by_name(name)
        if not limit.active:
            return None
        holders = (await client.read_concurrency_limit_by_tag(tag)).active_slots
    except ObjectNotFound:
        return None
    return Slots(name=name, most=limit.limit, taken=limit.active_slots, holders=tuple(holders))


async def told(client: PrefectClient, holders: tuple[UUID, ...]) -> str:
    """Task runs by their names, with those of their flow runs."""
    return ", ".join([await _name(client, holder) for holder in holders])


async def _name(client: PrefectClient, holder: UUID) -> str:
    try:
        task = await client.read_task_run(holder)
        if task.flow_run_id is None:
            return task.name
        flow = await client.read_flow_run(task.flow_run_id)
    except ObjectNotFound:  # the server is told of a task run some seconds after it began
        return f"task run {holder}"
    return f"{task.name} of flow run {flow.name}"
