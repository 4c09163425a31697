"""Verify re-reads everything and names the byte that lies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest, publish


@pytest.fixture
def yard(tmp_path: Path) -> Path:
    for name in ("corpus", "tokens"):
        folder = str(tmp_path / name)
        record = store.write_bytes(store.join(folder, "a.bin"), name.encode() * 1000)
        publish(store.join(folder, "manifest.json"), Manifest(stage=name, files=(record,)), None)
    return tmp_path


def verify(*urls: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stages.verify", *map(str, urls)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_a_whole_tree_is_verified(yard: Path) -> None:
    done = verify(yard)
    assert done.returncode == 0
    assert "verified 2 files, 12,000 bytes, in 2 artifacts" in done.stdout


@pytest.mark.slow
def test_one_flipped_bit_is_named(yard: Path) -> None:
    path = yard / "tokens" / "a.bin"
    data = bytearray(path.read_bytes())
    data[777] ^= 1
    path.write_bytes(data)
    done = verify(yard / "corpus", yard / "tokens")
    assert done.returncode == 1
    assert f"{path}: expected digest " in done.stderr
    assert ", found " in done.stderr
    assert "corpus" not in done.stderr


@pytest.mark.slow
def test_a_missing_file_and_a_missing_artifact_are_named(yard: Path) -> None:
    (yard / "corpus" / "a.bin").unlink()
    done = verify(yard)
    assert (done.returncode, "a.bin: missing" in done.stderr) == (1, True)
    done = verify(yard / "nothing")
    assert (done.returncode, "no finished artifact" in done.stderr) == (1, True)
