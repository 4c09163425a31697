"""A rank that embeds is killed: the others end, and a rerun makes only what is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.stages.directly import run_process, until
from tests.stages.embed_runs import CHUNKS, files, make_yard, words
from tests.stages.test_pretrain_failures import rank_process

pytestmark = [pytest.mark.kill, pytest.mark.distributed, pytest.mark.timeout(300)]

SLOW = """
import time
import numpy as np

def embed(texts):
    time.sleep(0.2)
    return np.array([[len(text), text.count("a")] for text in texts], np.float32)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedder that takes its time, so that a block is met."""
    folder = tmp_path / "packages"
    info = folder / "slow-1.dist-info"
    info.mkdir(parents=True)
    (folder / "slow_embedder.py").write_text(SLOW)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[trainyard.embedders]\nslow = slow_embedder:embed\n")
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.usefixtures("package")
def test_a_run_survives_the_kill_of_one_rank(tmp_path: Path) -> None:
    yard, out = make_yard(tmp_path), tmp_path / "out"
    arguments = words(
        *(yard, out), load=None, embedder="slow", retro_block_size=1, nproc_per_node=2
    )
    command = [sys.executable, "-m", "stages.retro_embed", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: (out / "blocks").is_dir() and len(files(out)) > 3)
            os.kill(rank_process(process.pid, 1), signal.SIGKILL)
            _, text = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 3, text
    assert "rank 1 was killed by SIGKILL" in text
    made = len(files(out))
    assert 3 < made < CHUNKS
    assert not (out / "manifest.json").exists()
    again = run_process("stages.retro_embed", *arguments)
    assert "resuming: blocks_done=" in again
    assert again.count("seconds=") - 1 <= CHUNKS - made + 1
    whole = words(*(yard, tmp_path / "whole"), load=None, embedder="slow", retro_block_size=1)
    run_process("stages.retro_embed", *whole)
    assert files(out) == files(tmp_path / "whole")
