"""A training that one GPU has no memory for, told as that.

python -m pytest -m gpu tests/gpu"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flows.backends.outcome import JobEnd, Kind, classify_exit, read_failure
from stages.runtime.failure import RUN_DIR
from tests.stages.directly import run_process
from tests.stages.pretrain_runs import write_documents

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
    run = tmp_path / "run"
    prefix = write_documents(tmp_path / "text", [[n % 31 for n in range(100)]] * 40)
    # Half of the GPU is the table of positions; its gradient and Adam's two are as large each.
    positions = torch.cuda.get_device_properties(0).total_memory // 2 // (16 * 4)
    words = ["--data-path", prefix, "--save", str(tmp_path / "save")]
    words += ["--max-position-embeddings", str(positions)]
    run_process(
        "stages.pretrain", *OPTIONS.split(), *words, expect=3, seconds=250, **{RUN_DIR: str(run)}
    )
    outcome = classify_exit("pretrain", JobEnd(failure=read_failure(str(run)), exit_code=3))
    assert (outcome.kind, outcome.error) == (Kind.GPU_MEMORY, "DeviceMemoryError"), outcome.message
    assert outcome.message.startswith("rank 0 ran out of memory on cuda:0: ")
