"""Blockwise and rowwise FP8 on a Hopper GPU: the cast in Triton, the products, a training.

python -m pytest -m gpu -s tests/gpu/test_fp8_blockwise.py    -s: with speeds"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.shapes import SHAPES
from tests.stages.directly import run_process
from tests.stages.pretrain_runs import ledger
from trainyard.fp8.blockwise import cast_blocks, cast_both, cast_tiles, decode
from trainyard.fp8.cast import FORWARD, Fp8Pair, cast_pair
from trainyard.fp8.product import scaled_product
from trainyard.fp8.recipe import Fp8Recipe
from trainyard.parallel.tensor.fp8_linear import fp8_linear

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU"),
]

BLOCKWISE = Fp8Recipe("e4m3", "blockwise")
RECIPES = [BLOCKWISE, Fp8Recipe("e4m3", "rowwise"), Fp8Recipe("hybrid", "rowwise")]
TOKENS = 8192
MATRICES = {
    "qkv": (4096, 6144),
    "fc1": (4096, 28672),
    "fc2": (14336, 4096),
    "scales that are filled up": (1280, 640),
}
"""Input and output of layers of Llama-3-8B, and of one whose width has 10 blocks of 128."""

TRAINING = (
    "--micro-batch-size 8 --global-batch-size 8 --train-iters 20 --eval-iters 0 --bf16"
    " --lr 5e-5 --lr-warmup-iters 10"
    " --mock-data --split 100,0,0 --tokenizer-type NullTokenizer --vocab-size 1000 --no-save-optim"
    " --nproc-per-node 1"
)


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def seconds(work: Callable[[], Any]) -> float:
    """The median of 20 runs, after 5."""
    found = []
    for run in range(25):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        if run >= 5:
            found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found)


@pytest.mark.parametrize("blocks", [False, True], ids=["tiles", "blocks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(128, 128), (256, 1280), (2048, 640)])
def test_the_kernel_casts_as_torch(
    shape: tuple[int, int], dtype: torch.dtype, blocks: bool
) -> None:
    wide = draw(shape[0], 2 * shape[1], seed=1, dtype=dtype).exp2().pow(4)
    x = wide[:, : shape[1]]  # rows apart, as the part of a tensor
    x[:128, :128] = 0
    ours = (cast_blocks if blocks else cast_tiles)(x, FORWARD)
    for mine, right in zip(ours, cast_both(x.cpu(), FORWARD, blocks), strict=True):
        assert torch.equal(mine.cpu().view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("name", MATRICES)
def test_the_three_products_are_those_of_the_cast_numbers(name: str) -> None:
    width_in, width_out = MATRICES[name]
    x, weight = draw(TOKENS, width_in, seed=1), draw(width_out, width_in, seed=2) * 0.02
    grad = draw(TOKENS, width_out, seed=3) * 1e-4
    x[:, ::97] *= 50  # channels that stand out
    pairs = cast_tiles(x, FORWARD), cast_blocks(weight, FORWARD), cast_tiles(grad, FORWARD)
    of_x, of_weight, of_grad = pairs
    products = {
        "forward": (rows(of_x), rows(of_weight), x @ weight.t()),
        "gradient of the input": (rows(of_grad), columns(of_weight), grad @ weight),
        "gradient of the weight": (columns(of_grad), columns(of_x), grad.t() @ x),
    }
    for what, ((a, a_scale), (b, b_scale), exact) in products.items():
        right = decode(a, a_scale) @ decode(b, b_scale).t()
        found = scaled_product(a, b, a_scale, b_scale, torch.bfloat16)
        assert distance(found, right) < 4e-3, what
        assert distance(found, exact) < 0.06, what


def rows(pair: Fp8Pair) -> tuple[Tensor, Tensor]:
    return pair.rows, pair.row_scale


def columns(pair: Fp8Pair) -> tuple[Tensor, Tensor]:
    return pair.columns, pair.column_scale


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_linear_map_is_that_of_a_cpu(recipe: Fp8Recipe, compiled: bool) -> None:
    torch._dynamo.reset()
    x, weight, bias = draw(64, 2, 256, seed=1), draw(384, 256, seed=2), draw(384, seed=3)
    grad = draw(64, 2, 384, seed=4)
    run = torch.compile(fp8_linear) if compiled else fp8_linear
    found = []
    for device, product in (("cuda", run), ("cpu", fp8_linear)):
        leaves = [t.detach().to(device).requires_grad_() for t in (x, weight, bias)]
        y = product(*leaves, recipe)
        y.backward(grad.to(device))
        found.append([y, *(leaf.grad for leaf in leaves)])
    for ours, right in zip(*found, strict=True):
        assert ours is not None
        assert right is not None
        assert distance(ours.cpu(), right) < 4e-3


@pytest.mark.parametrize("recipe", RECIPES[:2], ids=lambda recipe: recipe.scaling)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_finite_after_a_product(poison: float, recipe: Fp8Recipe) -> None:
    x, weight = draw(128, 256, seed=1), draw(128, 256, seed=2)
    x[3, 5] = poison
    y = fp8_linear(x, weight, None, recipe)
    assert not y[3].isfinite().any()
    assert y[4:].isfinite().all()  # no row but its own


def test_speeds_for_a_person_to_read() -> None:
    """Bytes that casts move, and operations of products, beside one scale for a tensor."""
    for name in ("qkv", "fc1", "fc2"):
        width_in, width_out = MATRICES[name]
        x, weight = draw(TOKENS, width_in, seed=1), draw(width_out, width_in, seed=2)
        moved = {"tiles": x.numel() * 4, "blocks": weight.numel() * 4}
        times = {
            "tiles": seconds(lambda x=x: cast_tiles(x, FORWARD)),
            "blocks": seconds(lambda w=weight: cast_blocks(w, FORWARD)),
        }
        for kind, taken in times.items():
            speed = moved[kind] / taken / 1e12
            print(f"{name}: cast by {kind} {taken * 1e6:.0f} us, {speed:.2f} TB/s")
        one = seconds(lambda x=x: cast_pair(x, FORWARD))
        print(f"{name}: cast by one scale {one * 1e6:.0f} us")
        operations = 2 * TOKENS * width_in * width_out
        scaled = [cast_tiles(x, FORWARD), cast_blocks(weight, FORWARD)]
        whole = [cast_pair(x, FORWARD), cast_pair(weight, FORWARD)]
        for kind, (a, b) in {"blockwise": scaled, "tensorwise": whole}.items():
            taken = seconds(
                lambda a=a, b=b: scaled_product(
                    a.rows, b.rows, a.row_scale, b.row_scale, torch.bfloat16
                )
            )
            print(f"{name}: product {kind} {operations / taken / 1e12:.0f} TFLOP/s")
        taken = seconds(lambda x=x, w=weight: x @ w.t())
        print(f"{name}: product in bf16 {operations / taken / 1e12:.0f} TFLOP/s")
        assert max(times.values()) < 1.0


def train(save: Path, *words: str) -> list[dict[str, Any]]:
    """The ledger of a training of gpt-345m."""
    options = (*SHAPES["gpt-345m"].flags(), *TRAINING.split(), *words, "--save", str(save))
    run_process("stages.pretrain", *options, expect=0, seconds=400)
    return ledger(save)


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train(tmp_path_factory.mktemp("bf16") / "run")


@pytest.mark.parametrize("scaling", ["blockwise", "rowwise"])
def test_gpt_345m_trains_as_in_bf16(
    scaling: str, in_bf16: list[dict[str, Any]], tmp_path: Path
) -> None:
    found = train(tmp_path / "run", "--fp8-format", "e4m3", "--fp8-recipe", scaling)
    assert in_bf16[-1]["lm_loss"] < 0.95 * in_bf16[0]["lm_loss"], "nothing was learnt"
    for plain, ours in zip(in_bf16, found, strict=True):
        print(f"step {plain['step']}: loss {plain['lm_loss']:.5f}, fp8 {ours['lm_loss']:.5f}")
        assert ours["lm_loss"] == pytest.approx(plain["lm_loss"], rel=0.02), plain["step"]
        assert ours["grad_norm"] == pytest.approx(plain["grad_norm"], rel=0.15), plain["step"]
