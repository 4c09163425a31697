"""Optimizer state in host memory: the losses of state on the GPU, in less of its memory.

python -m pytest -m gpu tests/gpu/test_offload.py"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.stages.directly import run_process
from tests.stages.pretrain_runs import ledger

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIONS = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 256 --mock-data"
    " --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 2 --global-batch-size 4"
    " --train-iters 12 --eval-iters 0 --lr 1e-3 --split 100,0,0 --tokenizer-type NullTokenizer"
    " --vocab-size 1000 --save-interval 6"
)
NUM_PARAMETERS = 52_000_000
PEAK = re.compile(r"peak memory \(GB\): ([0-9.e-]+)")


def train(save: Path, *words: str, expect: int = 0) -> float:
    """Run; the peak of allocated memory in bytes."""
    text = run_process(
        *("stages.pretrain", *OPTIONS.split(), "--save", str(save), *words),
        expect=expect,
        seconds=250,
    )
    found = PEAK.search(text)
    return float(found[1]) * 1e9 if found else 0.0


def losses(save: Path) -> list[float]:
    return [line["lm_loss"] for line in ledger(save)]


@pytest.mark.parametrize("precision", ["--bf16", ""], ids=["bf16", "fp32"])
def test_state_on_the_host_trains_alike_in_less_memory(precision: str, tmp_path: Path) -> None:
    words = precision.split()
    whole = train(tmp_path / "whole", *words)
    expected = losses(tmp_path / "whole")
    peaks = [whole]
    for fraction in ("0.5", "1.0"):
        save = tmp_path / fraction
        offload = ("--optimizer-cpu-offload", "--optimizer-offload-fraction", fraction)
        peaks.append(train(save, *words, *offload))
        assert losses(save) == pytest.approx(expected, rel=2e-3)
    assert expected[-1] < expected[0]
    # 12 bytes of a parameter beside 16-bit weights; of fp32 ones the moments, 8, while a run with
    # offloading alone keeps its gradients in buckets.
    saved = (12 if words else 8) * NUM_PARAMETERS
    assert whole - peaks[2] > 0.6 * saved
    assert peaks[0] > peaks[1] > peaks[2]


def test_a_run_may_move_its_state_to_the_host(tmp_path: Path) -> None:
    save = tmp_path / "run"
    train(save, "--bf16", "--exit-interval", "6", expect=143)
    train(save, "--bf16", "--optimizer-cpu-offload", "--async-save")
    train(tmp_path / "whole", "--bf16")
    assert losses(save) == pytest.approx(losses(tmp_path / "whole"), rel=2e-3)
