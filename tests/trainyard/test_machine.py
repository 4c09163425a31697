"""What control groups say of memory, and of processes that a signal ended."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from trainyard import machine
from trainyard.errors import HostMemoryError, InfrastructureError
from trainyard.machine import (
    death_by_signal,
    free_memory_bytes,
    memory_bytes,
    memory_kills,
)

EVENTS = "low 0\nhigh 3\nmax 9\noom 2\noom_kill 2\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"


def write(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("membership", "folder", "file", "text", "kills"),
    [
        ("0::/jobs/a\n", "jobs/a", "memory.events", EVENTS, 2),
        ("0::/\n", "", "memory.events", EVENTS, 2),
        ("0::/../outside\n", "", "memory.events", EVENTS, 2),
        ("5:cpu,cpuacct:/b\n4:memory:/b\n0::/c\n", "memory/b", "memory.oom_control", CONTROL, 5),
        ("4:memory:/of/the/machine\n", "memory", "memory.oom_control", CONTROL, 5),
        ("5:cpu:/b\n", "b", "memory.events", EVENTS, 0),
        ("0::/a\n", "a", "memory.events", "low 0\n", 0),
        ("0::/a\n", "a", "memory.events", "oom_kill many\n", 0),
        ("", "", "memory.events", EVENTS, 0),
    ],
)
def test_kills_are_counted_in_the_control_group_of_this_process(
    tmp_path: Path, membership: str, folder: str, file: str, text: str, kills: int
) -> None:
    write(tmp_path / "groups" / folder, file, text)
    (tmp_path / "membership").write_text(membership)
    assert memory_kills(tmp_path / "groups", tmp_path / "membership") == kills


def test_a_machine_without_control_groups_reports_no_kills(tmp_path: Path) -> None:
    assert memory_kills(tmp_path, tmp_path / "membership") == 0


@pytest.mark.parametrize(
    ("number", "kills", "kind", "words"),
    [
        (signal.SIGSEGV, 3, InfrastructureError, "job 7 was killed by SIGSEGV"),
        (signal.SIGKILL, 2, InfrastructureError, "out of memory: take less"),
        (signal.SIGKILL, 3, HostMemoryError, "by the kernel: .*; take less"),
    ],
)
def test_a_signal_that_ended_a_process_is_named_with_its_likely_cause(
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kills: int,
    kind: type[InfrastructureError],
    words: str,
) -> None:
    monkeypatch.setattr(machine, "memory_kills", lambda: kills)
    error = death_by_signal("job 7", number, 2, "take less")
    assert type(error) is kind
    assert re.search(words + "$", str(error)), error


@pytest.mark.parametrize(
    ("membership", "folder", "file", "text", "bound"),
    [
        ("0::/jobs/a\n", "jobs/a", "memory.max", "1048576\n", True),
        ("0::/jobs/a\n", "jobs/a", "memory.max", "max\n", False),
        ("4:memory:/b\n", "memory/b", "memory.limit_in_bytes", "1048576\n", True),
        ("4:memory:/b\n", "memory/b", "memory.limit_in_bytes", f"{2**63 - 4096}\n", False),
        ("", "", "memory.max", "1048576\n", False),
    ],
)
def test_memory_is_that_of_the_control_group_or_the_machine(
    tmp_path: Path, membership: str, folder: str, file: str, text: str, bound: bool
) -> None:
    whole = memory_bytes(tmp_path / "none", tmp_path / "none")
    write(tmp_path / "groups" / folder, file, text)
    (tmp_path / "membership").write_text(membership)
    found = memory_bytes(tmp_path / "groups", tmp_path / "membership")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert whole >= machine * 0.99
    assert found == (whole - machine + 2**20 if bound else whole)


def test_free_memory_is_what_the_tightest_control_group_leaves(tmp_path: Path) -> None:
    whole, left = free_memory_bytes(tmp_path / "none", tmp_path / "none")
    assert left == whole
    assert 2**20 < whole < memory_bytes(tmp_path / "none", tmp_path / "none")
    (tmp_path / "membership").write_text("0::/jobs/a\n")
    groups = tmp_path / "groups"

    def free() -> int:
        return free_memory_bytes(groups, tmp_path / "membership")[1]

    for name, text in {
        "memory.max": "900000\n",
        "memory.current": "800000\n",
        "memory.stat": "anon 500000\ninactive_file 250000\nactive_file 50000\n",
    }.items():
        write(groups / "jobs/a", name, text)
    assert free() == 400_000
    write(groups / "jobs", "memory.max", "100000\n")
    write(groups / "jobs", "memory.current", "99000\n")
    assert free() == 1000
    write(groups / "jobs", "memory.current", "100001\n")
    assert free() == 0


def test_free_memory_in_an_old_control_group(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("4:memory:/b\n")
    own = tmp_path / "groups" / "memory" / "b"
    write(own, "memory.limit_in_bytes", "900000\n")
    write(own, "memory.usage_in_bytes", "800000\n")
    write(own, "memory.stat", "inactive_file 1\ntotal_inactive_file 20000\n")
    assert free_memory_bytes(tmp_path / "groups", tmp_path / "membership")[1] == 120_000
