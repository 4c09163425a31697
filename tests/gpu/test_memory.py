"""A training that one GPU has no memory for, told as that.

python -m pytest -m gpu tests/gpu"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from flows.backends.outcome import JobEnd, Kind, classify_exit, read_failure
from stages.runtime.failure import RUN_DIR
from trainyard.corpus.indexed import IndexedWriter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIONS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --hidden-dropout 0"
    " --attention-dropout 0 --micro-batch-size 1 --global-batch-size 4 --train-iters 3"
    " --eval-iters 0 --lr 1e-3 --split 100,0,0 --tokenizer-type NullTokenizer --vocab-size 31"
)


def test_a_gpu_that_is_full_is_not_the_hosts_memory(tmp_path: Path) -> None:
    prefix, run = tmp_path / "text", tmp_path / "run"
    with open(f"{prefix}.bin", "wb") as data, open(f"{prefix}.idx", "wb") as index:
        writer = IndexedWriter(data, np.uint16)
        for _ in range(40):
            writer.add_document([np.arange(100, dtype=np.uint16) % 31])
        writer.write_index(index)
    # Half of the GPU is the table of positions; its gradient and Adam's two are as large each.
    positions = torch.cuda.get_device_properties(0).total_memory // 2 // (16 * 4)
    command = [sys.executable, "-m", "stages.pretrain", *OPTIONS.split()]
    paths = ["--data-path", str(prefix), "--save", str(tmp_path / "save")]
    ended = subprocess.run(
        [*command, *paths, "--max-position-embeddings", str(positions)],
        env={**os.environ, RUN_DIR: str(run)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 3, ended.stderr
    outcome = classify_exit("pretrain", JobEnd(failure=read_failure(str(run)), exit_code=3))
    assert (outcome.kind, outcome.error) == (Kind.GPU_MEMORY, "DeviceMemoryError"), outcome.message
    assert outcome.message.startswith("rank 0 ran out of memory on cuda:0: ")
