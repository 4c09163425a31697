"""The real stage on one and on two GPUs: every layout gives the losses of one GPU.

python -m pytest -m gpu tests/gpu"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from trainyard.corpus.indexed import IndexedWriter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

OPTIONS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --hidden-dropout 0.1"
    " --attention-dropout 0 --micro-batch-size 2 --global-batch-size 16 --train-iters 20"
    " --eval-iters 1 --eval-interval 10 --lr 1e-3 --split 90,10,0 --tokenizer-type NullTokenizer"
    " --vocab-size 1000 --position-embedding-type rope --swiglu --disable-bias-linear"
    " --normalization RMSNorm --save-interval 10"
)

LAYOUTS = {
    "tp2": "--tensor-model-parallel-size 2",
    "sp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "sp2 overlapped": "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
    "pp2": "--pipeline-model-parallel-size 2",
    "pp2 interleaved": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "cp2 ring": "--context-parallel-size 2",
    "cp2 allgather": "--context-parallel-size 2 --cp-comm-type allgather",
    "cp2 a2a": "--context-parallel-size 2 --cp-comm-type a2a",
    "dp2": "",
    "dp2 overlapped": "--overlap-grad-reduce --ddp-bucket-size 100000",
    "zero2": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    " --ddp-bucket-size 100000",
    "zero2 recomputed": "--use-distributed-optimizer --recompute-granularity full",
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("tokens") / "count"
    random = np.random.default_rng(0)
    with prefix.with_suffix(".bin").open("wb") as out, prefix.with_suffix(".idx").open("wb") as idx:
        writer = IndexedWriter(out, np.uint16)
        for start in random.integers(0, 1000, 2000):
            document = (int(start) + 3 * np.arange(400)) % 990
            writer.add_document([document.astype(np.uint16)])
        writer.write_index(idx)
    return prefix


def train(tokens: Path, save: Path, ranks: int, *flags: str) -> list[dict[str, float]]:
    words = [
        sys.executable,
        "-m",
        "stages.pretrain",
        "--nproc-per-node",
        str(ranks),
        *OPTIONS.split(),
    ]
    words += ["--data-path", str(tokens), "--save", str(save), *flags]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    return [json.loads(line) for line in (save / "ledger.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return train(tokens, tmp_path_factory.mktemp("alone") / "run", 1, "--bf16")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_gpus_train_as_one(
    layout: str, tokens: Path, alone: list[dict[str, float]], tmp_path: Path
) -> None:
    found = train(tokens, tmp_path / "run", 2, "--bf16", *LAYOUTS[layout].split())
    assert alone[-1]["lm_loss"] < 0.8 * alone[0]["lm_loss"], "nothing was learnt"
    for ours, right in zip(found, alone, strict=True):
        assert ours["lm_loss"] == pytest.approx(right["lm_loss"], rel=5e-3), ours["step"]
        assert ours["grad_norm"] == pytest.approx(right["grad_norm"], rel=0.05), ours["step"]


def test_a_run_goes_on_in_another_layout(tokens: Path, tmp_path: Path) -> None:
    save = tmp_path / "run"
    words = [
        sys.executable,
        "-m",
        "stages.pretrain",
        *OPTIONS.split(),
        "--bf16",
        "--save",
        str(save),
    ]
    words += ["--data-path", str(tokens)]
    first = subprocess.run([*words, "--exit-interval", "10"], capture_output=True, text=True)
    assert first.returncode != 0, "it was to stop half-way"
    words += ["--nproc-per-node", "2", "--tensor-model-parallel-size", "2"]
    second = subprocess.run(words, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr[-4000:]
    assert "resuming from step 10" in second.stderr
