"""Stages that wait for slots: one at a time, and not for longer than they have to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest

from flows import ui
from flows.runner import slots
from flows.runner.limits import Slots
from flows.runner.slots import StageLimit, note_begin
from flows.server import leases
from flows.server.ephemeral import LEASE_SECONDS, LEASES

ROOT = Path(__file__).resolve().parents[3]
ONE = UUID(int=1)
log = logging.getLogger("tests.slots")


def limit(taken: int, *holders: UUID, most: int = 1) -> Slots:
    return Slots(name="tag:yard:local:x", most=most, taken=taken, holders=holders)


def test_a_slot_without_a_lease_is_freed_and_those_with_one_are_kept() -> None:
    two = limit(2, ONE, most=3)
    assert (two.are_full, two.unleased) == (False, 1)
    assert two.freeing == "prefect gcl update tag:yard:local:x --active-slots 1"
    assert two.counted == "2 of 3 slots of tag:yard:local:x taken"
    assert limit(1, ONE).are_full
    assert limit(0, ONE).unleased == 0  # a lease that is being given back
    assert limit(0, most=0).are_full


def test_servers_that_outlive_a_flow_take_back_no_lease_when_they_have_just_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


class Limit:
    """A limit of one, as a server would tell of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: bool) -> None:
        self.free = free
        self.fault: Exception | None = None
        monkeypatch.setattr(slots, "slots_of", self._read)
        monkeypatch.setattr(slots, "get_client", contextlib.nullcontext)
        monkeypatch.setattr(slots, "LOOK_SECONDS", 0.01)
        monkeypatch.setattr(slots, "START_SECONDS", 0.01)

    async def _read(self, client: object, tag: str) -> Slots:
        if self.fault is not None:
            raise self.fault
        return limit(0 if self.free else 1)


def test_the_next_one_looks_for_a_slot_when_the_one_before_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, gate, seen = Limit(monkeypatch, free=True), StageLimit("yard:local:x"), list[str]()

    async def stage(name: str, begins: asyncio.Event, ends: asyncio.Event) -> None:
        async with gate.passed(name, log):
            seen.append(f"{name} asks")
            await begins.wait()
            note_begin()
            await ends.wait()

    async def flow() -> None:
        begin, end = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(stage("a", begin, end))
            group.create_task(stage("b", begin, end))
            await asyncio.sleep(0.1)
            assert seen == ["a asks"]
            server.free = False
            begin.set()
            await asyncio.sleep(0.1)
            assert seen == ["a asks"]
            server.free = True
            await asyncio.sleep(0.1)
            assert seen == ["a asks", "b asks"]
            end.set()

    asyncio.run(asyncio.wait_for(flow(), 30))


def test_one_that_is_stopped_or_fails_keeps_no_other_from_its_slot(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server, gate = Limit(monkeypatch, free=False), StageLimit("yard:local:x")

    async def stage(error: Exception | None) -> None:
        async with gate.passed("x", log):
            if error is not None:
                raise error

    async def flow() -> None:
        waiting = asyncio.create_task(stage(None))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait([waiting], timeout=5)
        assert waiting.cancelled()
        server.free = True
        with pytest.raises(KeyError):
            await stage(KeyError("of the task"))
        await stage(None)

    caplog.set_level(logging.INFO)
    asyncio.run(asyncio.wait_for(flow(), 30))
    (said,) = [record.getMessage() for record in caplog.records if record.name == log.name]
    assert said.split() == ["x", "waits", *limit(1).counted.split()]


def test_one_that_waits_in_the_engine_says_so_and_a_fault_of_telling_is_no_fault_of_the_stage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server, gate = Limit(monkeypatch, free=True), StageLimit("yard:local:x")

    async def flow() -> str:
        async with gate.passed("x", log):
            server.free = False  # another flow was quicker
            await asyncio.sleep(0.05)
            assert "waits" in caplog.text
            server.fault = OSError("the server is away")
            await asyncio.sleep(0.05)
            note_begin()
            return "done"

    caplog.set_level(logging.INFO)
    assert asyncio.run(asyncio.wait_for(flow(), 30)) == "done"
    said = [record for record in caplog.records if record.name == log.name]
    assert [record.levelname for record in said] == ["INFO", "WARNING"]
    assert "the server is away" in said[1].getMessage()
