"""Kernels of flash-attn, Transformer Engine and apex, called for real, against torch's.

Each case is skipped where its package is not installed; `-rs` lists which.

python -m pytest -m gpu -rs tests/gpu/test_packages.py"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainyard.attention.cases import attend, expected, inputs, masks, to
from trainyard.attention.base import Numerics
from trainyard.attention.select import KernelChoice, build_backend, probe_device
from trainyard.fp8.delayed import DelayedScaling, advance_all
from trainyard.fp8.recipe import Fp8Recipe
from trainyard.models.norms.kernels import NormChoice, build_norm_kernel
from trainyard.optim.kernels import MODULES, adam_kernel, is_installed
from trainyard.parallel.tensor.fp8_linear import fp8_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

S, D = 192, 64
FP8_SUMS = 1e-2
"""Products of the same 8-bit numbers, rounded to bf16; few numbers are cast to a neighbour."""
BF16 = 4e-2
"""Of the largest value: bf16 has 8 bits, and probabilities are rounded to it."""


def distance(found: Tensor | None, right: Tensor) -> float:
    """||found - right|| / ||right||."""
    assert found is not None
    wide = right.detach().to(found.device, torch.float32)
    return float((found.detach().float() - wide).norm() / wide.norm())


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)


def choice_of(package: str) -> KernelChoice:
    device = probe_device("cuda")
    if package == "te":
        if not device.transformer_engine:
            pytest.skip("transformer_engine is not installed")
        return KernelChoice("te", "cudnn", "asked for by a test", True)
    if not device.flash_attn:
        pytest.skip("flash-attn is not installed")
    return KernelChoice("flash", f"flash{device.flash_attn}", "asked for by a test", True)


@pytest.mark.parametrize("package", ["flash", "te"])
@pytest.mark.parametrize("kind", ["causal", "full", "window", "documents", "documents and window"])
@pytest.mark.parametrize("groups", [4, 2])
def test_attention(package: str, kind: str, groups: int) -> None:
    backend = build_backend(choice_of(package), Numerics(softmax_in_fp32=True), deterministic=False)
    given = inputs(S, S, groups=groups, d=D, dtype=torch.bfloat16, device="cuda")
    out, grads = attend(backend, given, to(masks(S)[kind], "cuda"), False)
    right, wanted = expected([x.cpu() for x in given], masks(S)[kind], False)
    for found, reference in zip((out, *grads), (right, *wanted), strict=False):
        assert distance(found, reference) < BF16


@pytest.mark.parametrize("package", ["apex", "transformer_engine"])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("centred", [False, True])
def test_norms(package: Any, normalization: str, centred: bool) -> None:
    module = "fused_layer_norm_cuda" if package == "apex" else package
    if not is_installed(module):
        pytest.skip(f"{module} is not installed")
    rms = normalization == "RMSNorm"
    names = {"apex": ("fused_layer_norm", "fused_rms_norm")}.get(package, ("LayerNorm", "RMSNorm"))
    kernel = build_norm_kernel(NormChoice(package, names[rms], "asked for by a test"))
    x = draw(64, 2, 1024, seed=1).requires_grad_()
    weight = torch.nn.Parameter(draw(1024, seed=2))
    bias = None if rms else torch.nn.Parameter(draw(1024, seed=3))
    grad = draw(64, 2, 1024, seed=4)
    leaves = [x, weight] if bias is None else [x, weight, bias]
    assert kernel is not None
    assert kernel.takes(x, weight)
    found = kernel(x, weight, bias, 1e-5, centred)
    of_found = torch.autograd.grad(found, leaves, grad)
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    scale = wide[1] + 1 if centred else wide[1]
    if rms:
        right = torch.nn.functional.rms_norm(wide[0], (1024,), scale, 1e-5)
    else:
        right = torch.nn.functional.layer_norm(wide[0], (1024,), scale, wide[2], 1e-5)
    of_right = torch.autograd.grad(right, wide, grad.float())
    for one, other in zip((found, *of_found), (right, *of_right), strict=True):
        assert distance(one, other) < 1e-2


@pytest.mark.parametrize("package", ["apex", "transformer_engine"])
def test_adam_steps(package: Any) -> None:
    if not is_installed(MODULES[package]):
        pytest.skip(f"{MODULES[package]} is not installed")
    kernel = adam_kernel(package)
    assert kernel is not None
    mine = [draw(*shape, seed=1, dtype=torch.float32) for shape in ((300, 70), (9_001,))]
    theirs = [torch.nn.Parameter(held.clone()) for held in mine]
    firsts, seconds = ([torch.zeros_like(held) for held in mine] for _ in range(2))
    adamw = torch.optim.AdamW(theirs, lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for step in range(1, 4):
        grads = [draw(*held.shape, seed=10 + step, dtype=torch.float32) for held in mine]
        for parameter, grad in zip(theirs, grads, strict=True):
            parameter.grad = grad.clone()
        adamw.step()
        kernel((grads, mine, firsts, seconds), 0.1, (0.8, 0.95), 1e-6, step, 0.1)
    for one, other in zip(mine, theirs, strict=True):
        assert distance(one, other) < 1e-6


def test_an_fp8_linear_layer_of_transformer_engine_and_ours_are_as_near_the_exact_product() -> None:
    if not is_installed("transformer_engine"):
        pytest.skip("transformer_engine is not installed")
    import transformer_engine.pytorch as te  # type: ignore[import-not-found]
    from transformer_engine.common.recipe import (  # type: ignore[import-not-found]
        Float8CurrentScaling,
    )

    x, weight, grad = draw(64, 2, 256, seed=1), draw(128, 256, seed=2), draw(64, 2, 128, seed=3)
    layer = te.Linear(256, 128, bias=False, params_dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        layer.weight.copy_(weight)
    given = x.clone().requires_grad_()
    with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
        engine = layer(given)
    engine.backward(grad)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    ours = fp8_linear(leaves[0], leaves[1], None, Fp8Recipe("hybrid"))
    ours.backward(grad)
    wide = [x.float().requires_grad_(), weight.float().requires_grad_()]
    exact = torch.nn.functional.linear(*wide)
    exact.backward(grad.float())
    theirs = (engine, given.grad, layer.weight.grad)
    for one, other, right in zip(
        (ours, *(leaf.grad for leaf in leaves)),
        theirs,
        (exact, *(leaf.grad for leaf in wide)),
        strict=True,
    ):
        assert right is not None
        assert distance(one, right) < 1.1 * distance(other, right) < 0.1


@pytest.mark.parametrize("format_", ["hybrid", "e4m3"])
@pytest.mark.parametrize("scaling", ["tensorwise", "delayed", "blockwise"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_fp8_products_of_transformer_engine_are_ours(
    format_: Any, scaling: Any, has_bias: bool
) -> None:
    """Both cast alike, so only the order of sums differs; delayed scales are of a first step."""
    if not is_installed("transformer_engine"):
        pytest.skip("transformer_engine is not installed")
    if scaling == "blockwise" and format_ == "hybrid":
        pytest.skip("no such recipe")
    recipe = Fp8Recipe(format_, scaling)
    x, weight = draw(128, 2, 512, seed=1), draw(256, 512, seed=2)
    bias, grad = draw(256, seed=3) if has_bias else None, draw(128, 2, 256, seed=4) / 2**20
    found = {}
    for backend in ("torch", "transformer_engine"):
        of_backend = replace(recipe, backend=backend)  # type: ignore[arg-type]
        scales = DelayedScaling(recipe, x.device) if scaling == "delayed" else None
        for _ in range(2):
            given = [x, weight] if bias is None else [x, weight, bias]
            leaves = [leaf.clone().requires_grad_() for leaf in given]
            last = None if bias is None else leaves[2]
            y = fp8_linear(leaves[0], leaves[1], last, of_backend, scales)
            y.backward(grad)
            advance_all([] if scales is None else [scales], None)
        found[backend] = [y, *(leaf.grad for leaf in leaves)]
    for ours, theirs in zip(*found.values(), strict=True):
        assert ours is not None
        assert distance(theirs, ours) < FP8_SUMS
    wide = torch.nn.functional.linear(
        x.float(), weight.float(), None if bias is None else bias.float()
    )
    assert 0.005 < distance(found["transformer_engine"][0], wide) < 0.1
