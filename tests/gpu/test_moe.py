"""Kernels for experts against torch: products of all experts, sums of the rows of a token."""

from __future__ import annotations

import pytest
import torch

from trainyard.fp8.recipe import Fp8Recipe
from trainyard.models.moe import routing
from trainyard.models.moe.grouped import (
    HOPPER,
    fp8_grouped_linear,
    grouped_linear,
    is_fusible,
    looped_linear,
)
from trainyard.models.moe.rows import rows_of
from trainyard.models.moe_config import MoEConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("counts", [[512, 512, 512, 512], [3, 0, 1021, 1024], [0, 0, 0, 2048]])
def test_the_grouped_kernel_equals_the_loop(counts: list[int]) -> None:
    torch.manual_seed(0)
    rows = torch.randn(sum(counts), 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(4, 384, 256, device="cuda") * 0.05).bfloat16().requires_grad_()
    sizes = torch.tensor(counts, device="cuda")
    if not is_fusible(rows, weight):
        pytest.skip("no kernel for this device")
    grad = torch.randn(sum(counts), 384, device="cuda", dtype=torch.bfloat16)
    fused = grouped_linear(rows, weight, sizes, fused=True)
    looped = looped_linear(rows, weight, sizes)
    torch.testing.assert_close(fused, looped, rtol=2e-2, atol=2e-2)
    for one, other in zip(
        torch.autograd.grad(fused, (rows, weight), grad),
        torch.autograd.grad(looped, (rows, weight), grad),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=0.1)


@pytest.mark.parametrize(
    "recipe",
    [
        Fp8Recipe("hybrid"),
        Fp8Recipe("e4m3", "rowwise"),
        Fp8Recipe("hybrid", "rowwise"),
        Fp8Recipe("e4m3", "blockwise"),
    ],
)
@pytest.mark.parametrize("counts", [[19, 0, 256, 237], [0, 0, 0, 512]])
def test_experts_in_8_bits_are_those_of_a_cpu(recipe: Fp8Recipe, counts: list[int]) -> None:
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("needs a Hopper GPU")
    torch.manual_seed(0)
    rows = torch.randn(sum(counts), 256, dtype=torch.bfloat16)
    weight = (torch.randn(4, 384, 256) * 0.05).bfloat16()
    grad = torch.randn(sum(counts), 384, dtype=torch.bfloat16)
    found = []
    for device in ("cpu", "cuda"):
        leaves = [t.to(device).requires_grad_() for t in (rows.clone(), weight.clone())]
        y = fp8_grouped_linear(*leaves, torch.tensor(counts, device=device), recipe)
        found.append([y.detach(), *torch.autograd.grad(y, leaves, grad.to(device))])
    for right, ours in zip(*found, strict=True):
        assert float((ours.cpu() - right).float().norm() / right.float().norm()) < 4e-3


@pytest.mark.parametrize("capacity", [None, "dropped", "padded"])
def test_sums_of_rows_are_those_of_a_cpu(capacity: str | None) -> None:
    torch.manual_seed(0)
    t, k, e, h = 96, 2, 4, 1100
    logits, x, grad = torch.randn(t, e), torch.randn(t, h), torch.randn(t, h)
    found = []
    for device in ("cpu", "cuda"):
        moe = MoEConfig(num_experts=e, moe_router_topk=k, moe_expert_capacity_factor=0.75)
        chosen = routing.choose(logits.to(device), moe, None)
        limit = routing.capacity(t, moe)
        assert limit is not None
        kept = None if capacity is None else routing.within_capacity(chosen, limit, moe)
        rows = rows_of(chosen.experts, e, kept, limit if capacity == "padded" else None)
        leaves = [v.to(device).requires_grad_() for v in (x, chosen.weights.detach().cpu())]
        out = rows.combine(rows.spread(leaves[0]) * 3.0, leaves[1])
        found.append([out, *torch.autograd.grad(out, leaves, grad.to(device))])
    for right, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours.cpu(), right, rtol=1e-5, atol=1e-4)
