"""Whether a job lives, by its files."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from flows.backends import liveness as signs
from flows.backends.liveness import Liveness
from trainyard.errors import InfrastructureError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(signs.time, "monotonic", lambda: now[0])
    return now


def write(path: Path, time_seconds: float) -> None:
    path.touch()
    os.utime(path, (time_seconds, time_seconds))


def test_a_changed_file_counts_whatever_its_time_is(tmp_path: Path, clock: list[float]) -> None:
    log, heartbeat = tmp_path / "log.txt", tmp_path / "heartbeat"
    signs = Liveness((log, heartbeat))
    clock[0] = 110.0
    assert signs.silent_seconds() == 10
    write(log, time.time() - 86400)  # of a file server that is a day behind
    assert signs.silent_seconds() == 0
    clock[0] = 130.0
    assert signs.silent_seconds() == 20
    write(heartbeat, time.time() + 86400)
    assert signs.silent_seconds() == 0
    clock[0] = 150.0
    assert signs.silent_seconds() == 20  # a clock ahead of ours does not keep it alive


def test_earlier_files_are_no_sign_of_life(tmp_path: Path, clock: list[float]) -> None:
    write(tmp_path / "log.txt", time.time())
    signs = Liveness((tmp_path / "log.txt",))
    clock[0] = 107.0
    assert signs.silent_seconds() == 7


def test_another_source_of_lines_and_renewing_count(tmp_path: Path, clock: list[float]) -> None:
    signs = Liveness((tmp_path / "heartbeat",))
    clock[0] = 120.0
    assert signs.silent_seconds(last_line=115.0) == 5
    signs.renew()
    clock[0] = 123.0
    assert signs.silent_seconds(last_line=115.0) == 3


class Stale(type(Path())):  # type: ignore[misc]  # which class of paths, the machine tells
    """A file on a file server that was set up again: its handle is stale."""

    is_back = False

    def stat(self, **how: Any) -> os.stat_result:
        if self.is_back:
            return super().stat(**how)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self))


def test_stale_handle(tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    path = Stale(tmp_path / "heartbeat")
    path.touch()
    monkeypatch.setattr(Stale, "is_back", True)
    signs = Liveness((path,))
    clock[0] = 110.0
    monkeypatch.setattr(Stale, "is_back", False)
    with pytest.raises(InfrastructureError, match=r"Stale file handle.*job keeps running"):
        signs.silent_seconds()
    monkeypatch.setattr(Stale, "is_back", True)
    assert signs.silent_seconds() == 10


def test_an_unreachable_folder_is_an_infrastructure_error(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "run")
    with pytest.raises(InfrastructureError, match=f"run folder {tmp_path}/run cannot be used"):
        Liveness((tmp_path / "run" / "heartbeat",))
