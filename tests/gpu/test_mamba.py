"""The mixer of Mamba-2 by our kernels, and by those of mamba-ssm and causal-conv1d where they are
installed, against plain torch.

python -m pytest -m gpu tests/gpu/test_mamba.py"""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from torch import Tensor

from trainyard.attention.masks import AttentionMask
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.mamba.fused import SsmKernels
from trainyard.models.mamba.kernels import PACKAGES, MambaBackend
from trainyard.models.mamba.mixer import MambaMixer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [(2, 300, 1, 3, 64, 128), (1, 64, 2, 2, 16, 16), (3, 130, 2, 4, 32, 64)]
"""b, l, g, r, p, n."""
FP32 = {"triton": 1e-4, "mamba_ssm": 5e-3}
"""Bounds in fp32; mamba-ssm multiplies in TF32."""


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda")


def mixer_of(shape: tuple[int, ...], dt_max: float | None) -> MambaMixer:
    """In fp32, with parameters that all matter."""
    _, length, g, r, p, n = shape
    config = MambaConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=1,
        seq_length=length,
        mamba_state_dim=n,
        mamba_head_dim=p,
        mamba_num_groups=g,
        mamba_num_heads=g * r,
        mamba_dt_min=0.05,
        mamba_dt_max=dt_max,
    )
    mixer = MambaMixer(config, 0).cuda()
    for seed, parameter in enumerate(mixer.parameters()):
        parameter.data.copy_(draw(*parameter.shape, seed=seed) * 0.3)
    return mixer


def answers(mixer: MambaMixer, x: Tensor, mask: AttentionMask, compiled: bool) -> list[Tensor]:
    """The output and all gradients."""
    dtype = mixer.in_proj.weight.dtype
    leaf = x.to(dtype).requires_grad_()
    out = (torch.compile(mixer) if compiled else mixer)(leaf, mask)
    grad = draw(*out.shape, seed=99).to(dtype)
    return [out, *torch.autograd.grad(out, [leaf, *mixer.parameters()], grad)]


@pytest.mark.parametrize("backend", ["triton", "mamba_ssm"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("documented", [False, True])
@pytest.mark.parametrize("dt_max", [None, 0.8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_mixer(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    dt_max: float | None,
    documented: bool,
    compiled: bool,
    backend: MambaBackend,
) -> None:
    if backend == "mamba_ssm" and not all(map(importlib.util.find_spec, PACKAGES)):
        pytest.skip(f"needs {' and '.join(PACKAGES)}")
    b, length = shape[:2]
    plain = mixer_of(shape, dt_max)
    plain.backend = "torch"
    ours = copy.deepcopy(plain).to(dtype)
    narrow = copy.deepcopy(ours)
    ours.backend = backend
    if backend == "mamba_ssm":
        ours._ssm = SsmKernels()
    x = draw(length, b, 32, seed=50)
    # Also where a chunk ends, and just behind that.
    places = torch.tensor([[0, 17 + row, 64, 65, length - 5, length] for row in range(b)]).cuda()
    mask = AttentionMask(bounds=places if documented else None)
    found, right = answers(ours, x, mask, compiled), answers(plain, x, mask, False)
    rounded = answers(narrow, x, mask, False)
    for index, (one, plainly, exact) in enumerate(zip(found, rounded, right, strict=True)):
        # In bf16 hardly further from fp32 than plain torch in bf16; sums of a few heads are noisy.
        least = FP32[backend] if dtype == torch.float32 else 3e-2
        bound = max(least, 1.5 * apart(plainly, exact))
        assert apart(one, exact) < bound, f"of number {index}: {apart(one, exact)}, {bound}"


def apart(x: Tensor, exact: Tensor) -> float:
    return float((x.detach().float() - exact.detach()).norm() / exact.detach().norm())
