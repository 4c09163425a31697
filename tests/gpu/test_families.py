"""Families and precisions on a GPU, compiled and in bf16, against the same training by plain torch
in fp32.

python -m pytest -m gpu tests/gpu/test_families.py"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --mock-data"
    " --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 4 --global-batch-size 8"
    " --train-iters 20 --eval-iters 0 --lr 1e-3 --split 100,0,0 --tokenizer-type NullTokenizer"
    " --vocab-size 1000 --nproc-per-node 1"
)
LLAMA = (
    "--position-embedding-type rope --swiglu --disable-bias-linear --normalization RMSNorm"
    " --untie-embeddings-and-output-weights"
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-aux-loss-coeff 0.01"
    " --moe-grouped-gemm"
)
LATENTS = (
    f"{LLAMA} --multi-latent-attention --q-lora-rank 96 --kv-lora-rank 64 --qk-head-dim 64"
    " --qk-pos-emb-head-dim 32 --v-head-dim 64 --qk-layernorm"
)
MAMBA = (
    "--model-type mamba --position-embedding-type none --normalization RMSNorm"
    " --disable-bias-linear --mamba-state-dim 64 --mamba-head-dim 64 --mamba-num-groups 2"
)
FAMILIES = {
    "latents": LATENTS,
    "latents and experts": f"{LATENTS} {EXPERTS}",
    "two more tokens": f"{LLAMA} --mtp-num-layers 2",
    "gpt-oss": (
        "--position-embedding-type yarn --yarn-rotary-scaling-factor 4"
        " --yarn-original-max-position-embeddings 128 --normalization RMSNorm"
        " --group-query-attention --num-query-groups 2 --kv-channels 64 --softmax-type learnable"
        " --window-size 63,0 --window-attn-skip-freq 2 --quick-geglu"
        f" --activation-func-clamp-value 7 --glu-linear-offset 1 {EXPERTS}"
    ),
    "mamba": MAMBA,
    "hybrid": f"{MAMBA} --hybrid-layer-pattern M*-E {EXPERTS}",
}
OPTIMIZERS = {
    "muon": ("--optimizer muon", "--bf16"),
    "lion": ("--optimizer lion --lr 1e-4", "--bf16"),
    "moments in bf16": (
        "",
        "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16"
        " --exp-avg-sq-dtype bf16",
    ),
    "gradients in fp16": ("", "--fp16 --initial-loss-scale 4096 --grad-reduce-in-fp16"),
}
"""Options of both trainings, and those of the one in 16 bits."""


def train(save: Path, *words: str) -> list[dict[str, Any]]:
    """The ledger of a training with these options."""
    paths = ("--save", str(save), "--no-save-optim")
    run_process("stages.pretrain", *OPTIONS.split(), *words, *paths, expect=0, seconds=400)
    return ledger(save)


def check_alike(
    found: list[dict[str, Any]], right: list[dict[str, Any]], loss: float, norm: float
) -> None:
    """Within these parts of the right loss and gradient norm."""
    assert right[-1]["lm_loss"] < 0.95 * right[0]["lm_loss"], "nothing was learnt"
    for ours, plain in zip(found, right, strict=True):
        assert ours["lm_loss"] == pytest.approx(plain["lm_loss"], rel=loss), ours["step"]
        # Delayed scaling knows no scales in the first step, and small gradients vanish.
        if ours["step"] > 1:
            assert ours["grad_norm"] == pytest.approx(plain["grad_norm"], rel=norm), ours["step"]


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_trains_as_fp32(family: str, tmp_path: Path) -> None:
    words = FAMILIES[family].split()
    plain = train(tmp_path / "plain", *words, "--compile-layers", "off")
    # Experts that change their tokens make the norm jump.
    check_alike(train(tmp_path / "bf16", *words, "--bf16"), plain, 0.02, 0.35)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_trains_in_16_bits_as_in_fp32(optimizer: str, tmp_path: Path) -> None:
    both, sixteen = (words.split() for words in OPTIMIZERS[optimizer])
    plain = train(tmp_path / "plain", *LLAMA.split(), *both, "--compile-layers", "off")
    found = train(tmp_path / "sixteen", *LLAMA.split(), *both, *sixteen)
    check_alike(found, plain, 0.01, 0.1)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("family", ["llama", "two more tokens"])
def test_fp8_trains_as_fp32(family: str, recipe: str, tmp_path: Path) -> None:
    words = [*{"llama": LLAMA, **FAMILIES}[family].split(), "--lr", "2e-4"]
    plain = train(tmp_path / "plain", *words, "--compile-layers", "off")
    fp8 = ("--bf16", "--fp8-format", "hybrid", "--fp8-recipe", recipe)
    check_alike(train(tmp_path / "fp8", *words, *fp8), plain, 0.02, 0.15)


@pytest.mark.parametrize(
    ("family", "fp8"),
    [
        ("experts", "--fp8-format hybrid"),
        ("experts", "--fp8-format hybrid --fp8-recipe delayed"),
        ("experts", "--fp8-format e4m3 --fp8-recipe rowwise"),
        ("experts", "--fp8-format e4m3 --fp8-recipe blockwise"),
        ("latents and experts", "--fp8-format hybrid --first-last-layers-bf16"),
    ],
)
def test_experts_in_fp8_train_as_in_bf16(family: str, fp8: str, tmp_path: Path) -> None:
    words = [*{"experts": f"{LLAMA} {EXPERTS}", **FAMILIES}[family].split(), "--bf16"]
    words += ["--lr", "2e-4"]
    plain = train(tmp_path / "bf16", *words)
    # As above, experts change their tokens.
    check_alike(train(tmp_path / "fp8", *words, *fp8.split()), plain, 0.02, 0.35)
