"""Norm kernels of packages against torch's, on CUDA, where they are installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainyard.attention.select import probe_device
from trainyard.errors import ConfigError
from trainyard.models.norm import NORMS
from trainyard.models.norms.kernels import build_norm_kernel
from trainyard.models.norms.select import NormNeeds, choose_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Of the largest value; parameters' gradients are sums over 256 rows, rounded once."""


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("request_", ["apex", "transformer_engine"])
@pytest.mark.parametrize(("size", "heads"), [(1024, ()), (128, (4,))], ids=["stream", "heads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("wide", [False, True], ids=["same", "fp32 stream"])
@pytest.mark.parametrize("centred", [False, True], ids=["scale", "1p"])
def test_kernels_of_packages_compute_what_torch_does(
    request_: Any, kind: str, size: int, heads: Any, dtype: torch.dtype, wide: bool, centred: bool
) -> None:
    needs = NormNeeds(
        normalization=kind, size=size, dtype=str(dtype).removeprefix("torch."), fp32_input=wide
    )
    try:
        kernel = build_norm_kernel(choose_norm(request_, probe_device("cuda"), needs))
    except ConfigError as refusal:
        pytest.skip(str(refusal))
    torch.manual_seed(3)
    ours, other = (
        NORMS[kind](size, 1e-5, centred=centred, kernel=k).to("cuda", dtype) for k in (None, kernel)
    )
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    other.load_state_dict(ours.state_dict())
    x = torch.randn(64, 4, *heads, size, device="cuda").to(torch.float32 if wide else dtype)
    weights = torch.randn_like(x)
    assert other.kernel is not None
    assert other.kernel.takes(x, other.weight)
    results = []
    for norm in (other, ours):
        given = x.clone().requires_grad_()
        out = norm(given)
        assert out.dtype == dtype
        loss = (out.float() * weights).sum()
        results.append([out, *torch.autograd.grad(loss, [given, *norm.parameters()])])
    for got, right in zip(*results, strict=True):
        worst = (got.float() - right.float()).abs().max() / right.float().abs().max()
        assert float(worst) <= BOUNDS[dtype]
