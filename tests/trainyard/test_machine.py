"""What control groups say of processes that the kernel ended for want of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainyard.machine import memory_kills

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
def test_kills_are_counted_in_the_group_of_this_process(
    tmp_path: Path, membership: str, folder: str, file: str, text: str, kills: int
) -> None:
    write(tmp_path / "groups" / folder, file, text)
    (tmp_path / "membership").write_text(membership)
    assert memory_kills(tmp_path / "groups", tmp_path / "membership") == kills


def test_a_machine_without_control_groups_says_nothing(tmp_path: Path) -> None:
    assert memory_kills(tmp_path, tmp_path / "membership") == 0
