"""Copies of what ranks save are made where every host has room for those of all its ranks."""

from __future__ import annotations

import pytest

from trainyard.checkpoint import host_room
from trainyard.checkpoint.host_room import HostRoom, RankRoom, tightest, tightest_host
from trainyard.checkpoint.ranks import ALONE


def found(mark: str, name: str, needed: int, free: int, left: int | None = None) -> RankRoom:
    return RankRoom(mark, name, needed, free, free if left is None else left)


def test_ranks_of_a_host_add_up_and_the_tightest_host_decides() -> None:
    first, second = ("mark-1", "node-1"), ("mark-2", "node-2")
    of_first = [found(*first, 30, 100), found(*first, 30, 90)]
    of_second = [found(*second, 30, 100), found(*second, 60, 100)]
    assert tightest(of_first + of_second) == HostRoom("node-2", 90, 100)
    assert tightest(of_first + of_second[:1]) == HostRoom("node-1", 60, 90)


def test_containers_of_a_machine_share_its_memory_and_each_has_its_own_limit() -> None:
    pods = [found("mark", f"pod-{rank}", 30, 100) for rank in range(3)]
    assert tightest(pods) == HostRoom("pod-0", 90, 100)
    limited = [found("mark", f"pod-{rank}", 30, 1000, 50) for rank in range(3)]
    assert tightest(limited) == HostRoom("pod-0", 30, 50)
    assert tightest([*limited, found("mark", "pod-1", 30, 1000, 50)]) == HostRoom("pod-1", 60, 50)


@pytest.mark.parametrize(("free", "is_enough"), [(0, False), (99, False), (100, True), (999, True)])
def test_a_quarter_of_what_is_free_stays_free(
    free: int, is_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_room, "free_memory_bytes", lambda: (10**12, free))
    assert tightest_host(75, ALONE).is_enough == is_enough
