"""Torch's norms with a backward pass of ours: which gradient goes where, and which norms have it.
The kernel itself is in tests/gpu/."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainyard.attention.select import Device
from trainyard.fp8.recipe import Fp8Recipe
from trainyard.models.fp8 import use_fp8
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.norm import NORMS, LayerNorm, forked
from trainyard.models.norms import own_backward, select
from trainyard.models.norms.own_backward import OwnBackward

X = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(9)) * 2 + 1
GRAD, STREAM = torch.randn(2, 3, 5, 48, generator=torch.Generator().manual_seed(8))


def formulas(
    grad: Tensor, stream: Tensor | None, x: Tensor, gain: Tensor, eps: float, is_layer_norm: bool
) -> list[Tensor]:
    """What the kernel computes."""
    grad, normed = grad.to(x.dtype), x - x.mean(-1, keepdim=True) if is_layer_norm else x
    scale = torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
    normed, of_norm = normed * scale, grad * gain
    of_x = of_norm - normed * (of_norm * normed).mean(-1, keepdim=True)
    if is_layer_norm:
        of_x = of_x - of_norm.mean(-1, keepdim=True)
    of_x = of_x * scale + (0 if stream is None else stream)
    return [of_x, (grad * normed).sum((0, 1)), *([grad.sum((0, 1))] if is_layer_norm else [])]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_backward, "_backward_op", formulas)
    monkeypatch.setattr(OwnBackward, "takes", lambda self, x, weight: torch.is_grad_enabled())


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("centred", [False, True], ids=["scale", "1p"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "fp32 stream"])
def test_each_gradient_reaches_its_tensor(kind: str, centred: bool, dtype: torch.dtype) -> None:
    def gradients(kernel: OwnBackward | None, fork: bool) -> list[Tensor]:
        norm = NORMS[kind](48, 1e-3, centred=centred, kernel=kernel).to(dtype)
        for number, parameter in enumerate(norm.parameters()):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
        x = X.clone().requires_grad_()
        stream, out = forked(norm, x) if fork else (x, norm(x))
        assert out.dtype == dtype
        total = (stream * STREAM).sum() + (out * GRAD.to(dtype)).sum()
        return [out, *torch.autograd.grad(total, [x, *norm.parameters()])]

    right = gradients(None, fork=False)
    near: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {}
    for kernel, fork in ((None, True), (OwnBackward(), False), (OwnBackward(), True)):
        found = gradients(kernel, fork)
        assert torch.equal(found[0], right[0])
        for ours, theirs in zip(found[1:], right[1:], strict=True):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, **near)


def test_it_is_for_training_on_cuda() -> None:
    weight = nn.Parameter(torch.ones(48))
    assert not OwnBackward().takes(X, weight)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(select, "TRITON", True)


def config(**changes: Any) -> GPTConfig:
    sizes = {"num_layers": 2, "hidden_size": 512, "num_attention_heads": 2, "seq_length": 8}
    return GPTConfig(**(sizes | changes))


@pytest.mark.usefixtures("cuda")
def test_auto_has_it_for_the_widths_of_hidden_states() -> None:
    assert isinstance(select.norm_kernel(config(), 512), OwnBackward)
    assert isinstance(select.norm_kernel(config(), 16384), OwnBackward)
    assert select.norm_kernel(config(), 128) is None
    assert select.norm_kernel(config(), 16385) is None
    assert select.norm_kernel(config(norm_backend="torch"), 512) is None
    needs = select.norm_needs(config(), torch.bfloat16, compiled=True)
    reason = select.choose_norm("auto", Device("cuda", (9, 0)), needs).reason
    assert "gradients by a kernel of ours" in reason


def test_layers_in_8_bits_leave_it_to_the_compiler() -> None:
    model = GPTModel(config(hidden_size=32), 64)
    for module in model.modules():
        if isinstance(module, LayerNorm):
            module.kernel = OwnBackward()
    use_fp8(model, Fp8Recipe("hybrid"), first=1)
    without = {
        name
        for name, module in model.named_modules()
        if isinstance(module, LayerNorm) and module.kernel is None
    }
    assert without == {f"decoder.layers.1.{at}_layernorm" for at in ("input", "pre_mlp")}
