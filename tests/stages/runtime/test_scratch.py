"""Scratch folders: removed at the end, or by a later run when theirs was killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from stages.runtime import scratch
from stages.runtime.scratch import Scratch

KILLED = """
import os, signal
from stages.runtime.scratch import Scratch
made = Scratch("test")
(made.path / "origins").mkdir()
print(made.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def killed() -> Path:
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True)
    folder = Path(done.stdout.strip())
    assert (folder / "origins").is_dir(), done.stderr
    return folder


def test_the_next_run_removes_the_scratch_folder_of_a_killed_one(tmp_path: Path) -> None:
    left = killed()
    for name in ("trainyard-no-lock", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / scratch.LOCK).touch()
    (tmp_path / "trainyard-link").symlink_to(tmp_path / "other")
    one, two = Scratch("a"), Scratch("b")
    assert not left.exists()
    assert one.path.exists(), "a folder in use was removed"
    one.close()
    two.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["other", "trainyard-link", "trainyard-no-lock"]


def test_the_folder_of_another_machine_stays(tmp_path: Path) -> None:
    left = killed()
    (left / scratch.LOCK).write_bytes(b"another boot")
    Scratch("a").close()
    assert left.exists()
