"""The real stage on one and on two GPUs: every layout gives the losses of one GPU.

python -m pytest -m gpu tests/gpu"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.stages.directly import run_process
from tests.stages.pretrain_runs import ledger, write_documents

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
    "gradients sharded": "--data-parallel-sharding-strategy optim_grads",
    "fsdp": "--use-torch-fsdp2",
    "fsdp recomputed": "--use-torch-fsdp2 --recompute-granularity full",
    "fsdp uncompiled": "--use-torch-fsdp2 --compile-layers off",
    "zero2 recomputed": "--use-distributed-optimizer --recompute-granularity full",
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    starts = np.random.default_rng(0).integers(0, 1000, 2000)
    documents = (((start + 3 * np.arange(400)) % 990).tolist() for start in starts)
    return write_documents(tmp_path_factory.mktemp("tokens") / "count", documents)


def train(tokens: str, save: Path, ranks: int, *words: str, expect: int = 0) -> str:
    paths = ("--data-path", tokens, "--save", str(save), "--nproc-per-node", str(ranks))
    return run_process(
        "stages.pretrain", *OPTIONS.split(), "--bf16", *paths, *words, expect=expect, seconds=250
    )


@pytest.fixture(scope="module")
def alone(tokens: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    save = tmp_path_factory.mktemp("alone") / "run"
    train(tokens, save, 1)
    return ledger(save)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_gpus_train_as_one(
    layout: str, tokens: str, alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    train(tokens, tmp_path / "run", 2, *LAYOUTS[layout].split())
    assert alone[-1]["lm_loss"] < 0.8 * alone[0]["lm_loss"], "nothing was learnt"
    for ours, right in zip(ledger(tmp_path / "run"), alone, strict=True):
        assert ours["lm_loss"] == pytest.approx(right["lm_loss"], rel=5e-3), ours["step"]
        assert ours["grad_norm"] == pytest.approx(right["grad_norm"], rel=0.05), ours["step"]


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_weights_gathered_in_8_bits_train_as_whole_ones(
    recipe: str, tokens: str, tmp_path: Path
) -> None:
    words = [*LAYOUTS["zero2"].split(), "--ffn-hidden-size", "768", "--fp8-format", "e4m3"]
    found = []
    for more in ([], ["--fp8-param-gather"]):
        save = tmp_path / f"run{len(more)}"
        train(tokens, save, 2, *words, "--fp8-recipe", recipe, *more)
        found.append([line["lm_loss"] for line in ledger(save)])
    assert found[1] == pytest.approx(found[0], rel=1e-3)


def test_sharded_weights_resume_whole_and_the_other_way_round(tokens: str, tmp_path: Path) -> None:
    fsdp = ("--use-torch-fsdp2", "--exit-interval", "10")
    train(tokens, tmp_path / "run", 2, *fsdp, expect=143)
    assert "resuming from step 10" in train(tokens, tmp_path / "run", 1)
    train(tokens, tmp_path / "other", 1, "--exit-interval", "10", expect=143)
    assert "resuming from step 10" in train(tokens, tmp_path / "other", 2, "--use-torch-fsdp2")


def test_a_run_goes_on_in_another_layout(tokens: str, tmp_path: Path) -> None:
    train(tokens, tmp_path / "run", 1, "--exit-interval", "10", expect=143)
    log = train(tokens, tmp_path / "run", 2, "--tensor-model-parallel-size", "2")
    assert "resuming from step 10" in log
