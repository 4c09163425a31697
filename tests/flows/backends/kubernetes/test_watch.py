"""Logs of pods: each line once, however often connections break and programs are killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from flows.backends.kubernetes import watch
from flows.backends.kubernetes.client import UnavailableError
from flows.backends.kubernetes.watch import PodLogs, split_line

BEGIN = 1_795_282_123


@pytest.mark.parametrize(
    ("stamp", "at"),
    [
        ("1970-01-01T00:00:01Z", 10**9),
        ("1970-01-01T00:00:01.5Z", 1_500_000_000),
        ("1970-01-01T00:00:01.123456789Z", 1_123_456_000),
        ("1970-01-01T02:00:01.000001+02:00", 1_000_001_000),
    ],
)
def test_times_are_read_to_the_microsecond(stamp: str, at: int) -> None:
    assert split_line(f"{stamp} a b".encode()) == (at, "a b")


def lines(count: int) -> list[tuple[int, bytes]]:
    """Four of the same microsecond, over several seconds."""
    stamp = "1970-01-01T00:00:{:02d}.000000007Z line {}"
    return [(i // 4, stamp.format(i // 4, i).encode()) for i in range(count)]


class Breaking:
    """A log whose connection breaks after every third line."""

    def __init__(self, whole: list[tuple[int, bytes]]) -> None:
        self.whole = whole

    async def log(self, pod: str, container: str, since: str) -> AsyncGenerator[list[bytes]]:
        begin = int(since[17:19]) if since else 0  # whole seconds, as the server has it
        left = [line for second, line in self.whole if second >= begin]
        seen = left[:7]
        yield seen[:2]
        yield seen[2:]
        if len(left) > 7:
            raise UnavailableError("broken")


def read(folder: Path, client: Any, relayed: list[str]) -> None:
    async def whole() -> None:
        logs = PodLogs(client, folder, relayed.append)
        logs.follow("pod", "log.txt", "0: ")
        logs.mark_ended("pod")
        await logs.finish(5)

    asyncio.run(whole())


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "AGAIN_SECONDS", 0.001)


def test_broken_connections_cost_no_line_and_give_none_twice(tmp_path: Path) -> None:
    relayed: list[str] = []
    read(tmp_path, Breaking(lines(40)), relayed)
    assert relayed == [f"0: line {number}" for number in range(40)]
    assert (tmp_path / "log.txt").read_text() == "".join(f"{line}\n" for line in relayed)


def test_unrecorded_lines_are_written_again_once(tmp_path: Path) -> None:
    first: list[str] = []
    read(tmp_path, Breaking(lines(6)), first)
    with (tmp_path / "log.txt").open("a") as log:
        log.write("0: line 6\n0: li")  # by a program that was killed there
    second: list[str] = []
    read(tmp_path, Breaking(lines(20)), second)
    assert second == [f"0: line {number}" for number in range(6, 20)]
    expected = "".join(f"0: line {number}\n" for number in range(20))
    assert (tmp_path / "log.txt").read_text() == expected
