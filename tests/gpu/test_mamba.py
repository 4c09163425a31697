"""Kernels of Mamba-2 against plain torch.

python -m pytest -m gpu tests/gpu/test_mamba.py"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from trainyard.models.mamba.conv import causal_conv
from trainyard.models.mamba.fused import triton_conv, triton_scan
from trainyard.models.mamba.scan import chunked_scan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [(2, 300, 1, 3, 64, 128), (1, 64, 2, 2, 16, 16), (3, 130, 2, 4, 32, 64)]
"""b, l, g, r, p, n."""


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def documents_of(b: int, length: int) -> Tensor:
    return (draw(b, length, seed=9) > 1.8).long().cumsum(1)


def check_alike(
    ours: Callable[..., Tensor], right: Callable[..., Tensor], inputs: list[Tensor], bound: float
) -> None:
    """Outputs and gradients, within so much of their norms; `right` computes in fp32."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    wide = [x.detach().float().clone().requires_grad_() for x in inputs]
    found, expected = ours(*leaves), right(*wide)
    grad = draw(*expected.shape, seed=8)
    pairs = [
        (found, expected),
        *zip(
            torch.autograd.grad(found, leaves, grad.to(found.dtype)),
            torch.autograd.grad(expected, wide, grad),
            strict=True,
        ),
    ]
    for index, (one, other) in enumerate(pairs):
        distance = float((one.float() - other).norm() / other.norm())
        assert distance < bound, f"of number {index}: {distance}"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("documented", [False, True])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_scan(
    shape: tuple[int, ...], dtype: torch.dtype, bound: float, documented: bool, compiled: bool
) -> None:
    b, length, g, r, p, n = shape
    mixed = draw(b, length, g * r * p + 2 * g * n, seed=1, dtype=dtype)
    x, to_state, of_state = mixed.split((g * r * p, g * n, g * n), dim=-1)
    inputs = [
        x.unflatten(-1, (g, r, p)),
        draw(b, length, g, r, seed=2).sigmoid() * 0.3,
        -draw(g, r, seed=3).exp(),
        to_state.unflatten(-1, (g, n)),
        of_state.unflatten(-1, (g, n)),
    ]
    documents = documents_of(b, length) if documented else None

    def ours(*leaves: Any) -> Tensor:
        y: Tensor = triton_scan(*leaves, documents)
        return y

    def right(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return chunked_scan(x, dt, a, b, c, 32, documents)[0]

    check_alike(torch.compile(ours) if compiled else ours, right, inputs, bound)


@pytest.mark.parametrize("documented", [False, True])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"]
)
def test_the_convolution(dtype: torch.dtype, bound: float, documented: bool) -> None:
    b, length, c = 2, 300, 200
    inputs = [
        draw(b, length, c + 8, seed=1, dtype=dtype)[..., 8:],
        draw(c, 1, 4, seed=2, dtype=dtype),
        draw(c, seed=3, dtype=dtype),
    ]
    documents = documents_of(b, length) if documented else None

    def ours(*leaves: Any) -> Tensor:
        y: Tensor = triton_conv(*leaves, documents)
        return y

    def right(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return causal_conv(x, weight, bias, documents)

    check_alike(ours, right, inputs, bound)
