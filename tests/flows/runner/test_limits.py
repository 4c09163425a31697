"""Stages under a limit: each waits for a slot, keeps it while it runs, and gives it back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.client.schemas.objects import ConcurrencyLeaseHolder
from prefect.exceptions import ObjectNotFound

from flows import ui
from flows.runner import limits
from flows.runner.limits import Slots, StageLimit, take_slot
from flows.server import leases
from flows.server.ephemeral import LEASE_SECONDS, LEASES

ROOT = Path(__file__).resolve().parents[3]
ONE = UUID(int=1)
TAG = "yard:local:x"
log = logging.getLogger("tests.limits")


def slots(taken: int, *holders: UUID, total: int = 1) -> Slots:
    return Slots(name=f"tag:{TAG}", total=total, taken=taken, holders=holders)


def test_a_slot_without_a_lease_is_freed_and_those_with_one_are_kept() -> None:
    two = slots(2, ONE, total=3)
    assert (two.are_full, two.unleased) == (False, 1)
    assert two.free_command == "prefect gcl update tag:yard:local:x --active-slots 1"
    assert two.counts == "2 of 3 slots of tag:yard:local:x in use"
    assert slots(1, ONE).are_full
    assert slots(0, ONE).unleased == 0  # a lease that is being given back
    assert slots(0, total=0).are_full


def test_new_server_expires_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = LEASES
    assert ui.SETTINGS[name] == leases.__name__
    assert f"{name}: {leases.__name__}\n" in (ROOT / "docker-compose.yml").read_text()

    async def renewed_late() -> None:
        storage = leases.ConcurrencyLeaseStorage(tmp_path)
        late, gone = [await storage.create_lease([ONE], timedelta(seconds=-5)) for _ in range(2)]
        assert await storage.read_expired_lease_ids() == []
        assert await storage.renew_lease(late.id, timedelta(seconds=LEASE_SECONDS))
        monkeypatch.setattr(leases, "_began", time.monotonic() - LEASE_SECONDS)
        assert await storage.read_expired_lease_ids() == [gone.id]

    monkeypatch.setattr(leases, "_began", time.monotonic())
    asyncio.run(renewed_late())


class Server:
    """A limit of one slot, as Prefect's client shows it."""

    api_url = "http://server/api/"

    def __init__(self) -> None:
        self.leases: dict[UUID, UUID] = {}
        self.forgotten = 0
        """Slots that are taken without a lease."""
        self.exists = True
        self.fault: Exception | None = None
        self.renewals = 0

    async def read_global_concurrency_limit_by_name(self, name: str) -> Any:
        if self.fault is not None:
            raise self.fault
        if not self.exists:
            raise ObjectNotFound(Exception(name))
        taken = len(self.leases) + self.forgotten
        return SimpleNamespace(active=True, limit=1, active_slots=taken)

    async def read_concurrency_limit_by_tag(self, tag: str) -> Any:
        return SimpleNamespace(active_slots=list(self.leases.values()))

    async def read_task_run(self, task_run: UUID) -> Any:
        raise ObjectNotFound(Exception(str(task_run)))

    async def increment_concurrency_slots_with_lease(
        self, names: list[str], count: int, mode: str, seconds: float, holder: Any
    ) -> httpx.Response:
        assert (names, count, seconds) == ([f"tag:{TAG}"], 1, LEASE_SECONDS)
        assert isinstance(holder, ConcurrencyLeaseHolder)
        if self.leases or self.forgotten:
            raise refusal(HTTPStatus.LOCKED)
        lease = uuid4()
        self.leases[lease] = holder.id
        return httpx.Response(HTTPStatus.OK, json={"lease_id": str(lease)})

    async def renew_concurrency_lease(self, lease: UUID, seconds: float) -> None:
        if self.fault is not None:
            raise self.fault
        if lease not in self.leases:
            raise refusal(HTTPStatus.GONE)
        self.renewals += 1

    async def release_concurrency_slots_with_lease(self, lease: UUID) -> None:
        if self.fault is not None:
            raise self.fault
        del self.leases[lease]


def refusal(status: HTTPStatus) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://server")
    return httpx.HTTPStatusError("", request=request, response=httpx.Response(status))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Server:
    server = Server()
    monkeypatch.setenv("PREFECT__RUNTIME__TASK_RUN__ID", str(ONE))
    monkeypatch.setattr(limits, "get_client", lambda: contextlib.nullcontext(server))
    for name in ("LOOK_SECONDS", "RENEW_SECONDS", "AGAIN_SECONDS"):
        monkeypatch.setattr(limits, name, 0.01)
    caplog.set_level(logging.INFO)
    return server


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = [record.getMessage() for record in caplog.records if record.name == log.name]
    return [" ".join(message.split()) for message in ours]


async def stage(limit: StageLimit, work: Callable[[], Awaitable[object]]) -> None:
    async with limit.apply("x", log):
        await take_slot()
        await work()


def run(flow: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(flow(), 30)

    asyncio.run(limited())


def test_a_stage_waits_for_a_slot(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    async def flow() -> None:
        limit, end = StageLimit(TAG), asyncio.Event()
        first = asyncio.create_task(stage(limit, end.wait))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(stage(limit, take_slot))  # an attempt that follows
        await asyncio.sleep(0.05)
        assert list(server.leases.values()) == [ONE]
        assert server.renewals
        assert not second.done()
        end.set()
        await asyncio.gather(first, second)
        assert server.leases == {}

    run(flow)
    assert logged(caplog) == [
        f"x waits {slots(1).counts}, by task run {ONE}; a run that was killed gives its slot back "
        f"within {LEASE_SECONDS} s"
    ]


def test_stopped_and_failed_free_the_slot(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    async def failing() -> None:
        raise KeyError("of the task")

    async def flow() -> None:
        limit = StageLimit(TAG)
        server.forgotten = 1
        waiting = asyncio.create_task(stage(limit, take_slot))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.wait([waiting], timeout=5)
        assert waiting.cancelled()
        server.forgotten = 0
        with pytest.raises(KeyError):
            await stage(limit, failing)
        await stage(limit, take_slot)
        assert server.leases == {}

    run(flow)
    assert logged(caplog) == [f"x waits {slots(1).counts}"]


@pytest.mark.parametrize("is_free", [True, False])
def test_lost_slot_retaken(server: Server, caplog: pytest.LogCaptureFixture, is_free: bool) -> None:
    async def work() -> None:
        server.leases.clear()
        server.forgotten = 0 if is_free else 1
        await asyncio.sleep(0.1)
        assert len(server.leases) == is_free

    run(lambda: stage(StageLimit(TAG), work))
    outcome = "and taken again" if is_free else "and another job holds the slot, so one job more"
    (message,) = [line for line in logged(caplog) if "was lost" in line]
    assert f"that of tag:{TAG} was lost while the server could not be reached, {outcome}" in message


def test_an_absent_server_ends_no_stage(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        server.fault = OSError("the server is away")
        await asyncio.sleep(0.05)

    run(lambda: stage(StageLimit(TAG), work))
    (message,) = logged(caplog)
    assert message == f"x: its slot of {TAG} was not given back: the server is away"


def test_without_a_registered_limit_a_stage_runs_at_once(server: Server) -> None:
    server.exists = False

    async def work() -> None:
        assert server.leases == {}

    run(lambda: stage(StageLimit(TAG), work))


def test_a_slot_without_a_lease_is_reported_with_the_command_that_frees_it(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LOST_SECONDS", 0.03)
    server.forgotten = 1

    async def flow() -> None:
        waiting = asyncio.create_task(stage(StageLimit(TAG), take_slot))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.wait([waiting])

    run(flow)
    first, second = logged(caplog)
    assert first == f"x waits {slots(1).counts}"
    assert second.endswith(
        "1 by no run that the server knows of. If none of them runs any more: "
        f"PREFECT_API_URL={server.api_url} {slots(1).free_command}"
    )
