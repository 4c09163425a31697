"""The file that says that a training lives."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from flows.backends import run_folder
from stages.pretrain import heartbeat
from stages.pretrain.heartbeat import Heartbeat, heartbeats
from stages.runtime.failure import RUN_DIR

NOTHING: Any = None
"""What a heartbeat does not look at."""


def test_steps_touch_the_heartbeat_at_most_every_few_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    beat = Heartbeat(tmp_path / heartbeat.FILE)
    beat.begin(NOTHING)
    os.utime(tmp_path / heartbeat.FILE, (1, 1))
    now[0] += heartbeat.BETWEEN_SECONDS / 2
    beat.after_step(NOTHING)
    assert (tmp_path / heartbeat.FILE).stat().st_mtime == 1
    now[0] += heartbeat.BETWEEN_SECONDS / 2
    beat.after_step(NOTHING)
    assert (tmp_path / heartbeat.FILE).stat().st_mtime > 1


def test_rank_0_touches_the_heartbeat_of_the_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert heartbeat.FILE == run_folder.HEARTBEAT
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    assert len(heartbeats(0)) == 1
    assert heartbeats(1) == ()
    monkeypatch.delenv(RUN_DIR)
    assert heartbeats(0) == ()


def test_a_missing_folder_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Heartbeat(tmp_path / "gone" / heartbeat.FILE).begin(NOTHING)
    assert "cannot touch heartbeat" in caplog.text
