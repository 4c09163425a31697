"""Our own kernels against torch's operators.

python -m pytest -m gpu tests/gpu/test_kernels.py"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trainyard.fp8.cast import FORWARD, WIDE, cast_pair
from trainyard.fp8.recipe import Fp8Recipe
from trainyard.models.swiglu import swiglu
from trainyard.optim.config import OptimizerConfig
from trainyard.optim.narrow_moments import NarrowMoments
from trainyard.optim.rules import AdamW
from trainyard.optim.update import FlatTensors, UpdateTerms
from trainyard.parallel.data.accumulate import put_gradient
from trainyard.parallel.tensor.fp8_linear import fp8_linear
from trainyard.testing.tolerances import FP32_UPDATE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG: dict[str, Any] = {"lr": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-6}


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)


@pytest.mark.parametrize("spans", [((0, 70_016), (70_080, 90_000)), ((3, 5), (7, 9001))])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("publish", [True, False])
@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16])
def test_flat_adamw_updates_as_torchs_and_nothing_outside_its_spans(
    spans: tuple[tuple[int, int], ...],
    grad_dtype: torch.dtype,
    publish: bool,
    moment_dtype: torch.dtype,
) -> None:
    size = spans[-1][1] + 77
    main = draw(size, seed=1, dtype=torch.float32)
    params = torch.full((size,), 3.0, device="cuda", dtype=torch.bfloat16)
    flat = FlatTensors(
        draw(size, seed=2, dtype=grad_dtype),
        main,
        (torch.zeros_like(main, dtype=moment_dtype), torch.zeros_like(main, dtype=moment_dtype)),
        params if publish else None,
    )
    before, moments = main.clone(), [torch.zeros_like(moment) for moment in flat.moments]
    expected = main.clone()
    ours = AdamW(OptimizerConfig(**CONFIG), "cuda")
    torchs = NarrowMoments(AdamW(OptimizerConfig(**CONFIG, optimizer_backend="torch"), "cuda"))
    assert ours.flat is not None
    # A sum next to the middle of two bfloat16 numbers may be rounded the other way.
    near = FP32_UPDATE if moment_dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-7}
    for step in range(1, 5):
        flat.grads.copy_(draw(size, seed=step + 5, dtype=grad_dtype) * 3)
        terms = UpdateTerms(0.1 / step, 0.3, step, 3.0)
        ours.flat.update(flat, spans, terms)
        for begin, end in spans:
            views = [tensor[begin:end] for tensor in (expected, *moments)]
            grads = flat.grads[begin:end].float()
            torchs.update([views[0]], [grads], [[views[1]], [views[2]]], terms)
    inside = torch.zeros(size, dtype=torch.bool, device="cuda")
    for begin, end in spans:
        inside[begin:end] = True
    torch.testing.assert_close(main[inside], expected[inside], **near)
    for mine, theirs in zip(flat.moments, moments, strict=True):
        assert mine.dtype == moment_dtype
        torch.testing.assert_close(mine, theirs, **near)
    assert torch.equal(main[~inside], before[~inside])
    assert torch.equal(params[~inside], torch.full_like(params, 3.0)[~inside])
    if publish:
        assert torch.equal(params[inside], main[inside].bfloat16())


def test_gradients_add_up_as_torchs() -> None:
    total, expected = torch.full((301, 77), 9.0, device="cuda"), torch.zeros(301, 77, device="cuda")
    for index in range(3):
        grad = draw(301, 77, seed=index)
        put_gradient(total, grad, is_first=index == 0)
        expected += grad
        assert torch.equal(total, expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_swiglu_and_its_gradient_are_its_formulas(compiled: bool) -> None:
    x = draw(70, 3, 2 * 1100, seed=1).requires_grad_()
    grad = draw(70, 3, 1100, seed=2)
    y = (torch.compile(swiglu) if compiled else swiglu)(x)
    y.backward(grad)
    exact = x.detach().double().requires_grad_()
    gate, up = exact.chunk(2, dim=-1)
    right = gate * torch.sigmoid(gate) * up
    right.backward(grad.double())
    torch.testing.assert_close(y, right.bfloat16(), rtol=2**-6, atol=1e-6)
    assert x.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(x.grad, exact.grad.bfloat16(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("dtype", [FORWARD, WIDE])
@pytest.mark.parametrize("shape", [(256, 512), (48, 80), (1, 16)])
def test_a_cast_is_the_same_on_a_gpu_and_a_cpu(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = draw(*shape, seed=3)
    ours, theirs = cast_pair(x, dtype), cast_pair(x.cpu(), dtype)
    assert torch.equal(ours.row_scale.cpu(), theirs.row_scale)
    for mine, other in ((ours.rows, theirs.rows), (ours.columns, theirs.columns)):
        assert torch.equal(mine.cpu().view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_finite_after_a_product(poison: float) -> None:
    x, weight = draw(32, 64, seed=1), draw(48, 64, seed=2)
    x[3, 5] = poison
    assert not fp8_linear(x, weight, None, Fp8Recipe("hybrid")).isfinite().all()


@pytest.mark.parametrize("recipe", [Fp8Recipe("hybrid"), Fp8Recipe("e4m3")])
@pytest.mark.parametrize("compiled", [False, True])
def test_fp8_products_are_those_that_a_cpu_computes(recipe: Fp8Recipe, compiled: bool) -> None:
    torch._dynamo.reset()
    x, weight, bias = draw(32, 2, 256, seed=1), draw(128, 256, seed=2), draw(128, seed=3)
    grad = draw(32, 2, 128, seed=4)
    run = torch.compile(fp8_linear) if compiled else fp8_linear
    found = []
    for device, product in (("cuda", run), ("cpu", fp8_linear)):
        leaves = [t.detach().to(device).requires_grad_() for t in (x, weight, bias)]
        y = product(*leaves, recipe)
        y.backward(grad.to(device))
        found.append([y, *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*found, strict=True):
        assert ours is not None
        assert theirs is not None
        distance = (ours.cpu().float() - theirs.float()).norm() / theirs.float().norm()
        assert distance < 4e-3
