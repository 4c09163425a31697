"""Products of all experts in one kernel against one after the other."""

from __future__ import annotations

import pytest
import torch

from trainyard.models.moe.grouped import grouped_linear, is_fusible, looped_linear

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
