"""Activations, and the split of queries, keys and values, that give the gradient of the bias before
them.

python -m pytest -m gpu tests/gpu/test_bias_grads.py"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from trainyard.models import attention, mlp
from trainyard.models.attention import SelfAttention
from trainyard.models.bias_grads import KINDS, activated, split_heads
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.mlp import ACTIVATIONS, MLP
from trainyard.testing.tolerances import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NEAR = {torch.float32: 3e-6, torch.bfloat16: 2**-8}
"""Relative error of one number: of the kernels' exponentials, or of rounding."""
SHAPES = [(70, 3, 1100), (1, 1, 5), (40, 2, 4096), (130, 1, 2049)]
HEADS = [(40, 3, 4, 1, 64), (9, 2, 2, 4, 80), (130, 1, 3, 2, 128), (1, 1, 1, 1, 33)]
"""s, b, g, r, d."""


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def gradients(
    fn: Callable[..., Any], leaves: list[Tensor], grads: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = fn(*leaves)
    outs = list(out) if isinstance(out, tuple) else [out]
    return outs, list(torch.autograd.grad(outs, leaves, grads))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_activations_and_their_gradients_are_their_formulas(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, compiled: bool
) -> None:
    torch._dynamo.reset()
    x, grad = 2 * draw(*shape, seed=1, dtype=dtype), draw(*shape, seed=2, dtype=dtype)
    bias = draw(shape[-1], seed=3, dtype=dtype)
    run = torch.compile(activated, dynamic=False) if compiled else activated
    (y,), (of_x, of_bias) = gradients(lambda x, b: run(x, b, kind), [x, bias], [grad])
    (right,), (right_grad,) = gradients(ACTIVATIONS[kind], [x.double()], [grad.double()])
    near = NEAR[dtype]
    torch.testing.assert_close(y.double(), right, rtol=near, atol=1e-9)
    # Absolute where a slope crosses 0.
    torch.testing.assert_close(of_x.double(), right_grad, rtol=near, atol=2e-6)
    total = right_grad.flatten(0, 1).sum(0)
    assert of_bias.dtype == dtype
    torch.testing.assert_close(of_bias.double(), total, rtol=2 * near, atol=1e-4)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh"])
def test_gelu_of_every_number_is_the_exact_one_rounded(kind: str) -> None:
    every = torch.arange(2**16, device="cuda").to(torch.int16).view(torch.bfloat16)
    normal = every.float().abs() > 1e-37  # smaller ones become zero
    x = every[(every.float() > -9) & (every.float() < 100) & normal]
    exact = x.double()
    inner = 2 * (2 / torch.pi) ** 0.5 * (exact + 0.044715 * exact**3)
    gate = torch.special.ndtr(exact) if kind == "gelu" else torch.sigmoid(inner)
    found = activated(x, x, kind)
    right = exact * gate
    # One in hundreds lies as near the middle of two numbers as the kernel's error is large: 26 of
    # 32,000 on an H200. Then it is the other one.
    assert (found != right.bfloat16()).double().mean() < 2e-3
    torch.testing.assert_close(found.double(), right, rtol=2**-8, atol=1e-37)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_finite_behind_an_activation(kind: str, poison: float) -> None:
    x, bias = draw(8, 2, 64, seed=1), draw(64, seed=2)
    x[3, 1, 5] = poison
    (y,), (of_x, _) = gradients(lambda x, b: activated(x, b, kind), [x, bias], [torch.ones_like(x)])
    assert not y[3, 1, 5].isfinite()
    assert y.isfinite().sum() == y.numel() - 1
    assert poison == float("inf") or of_x[3, 1, 5].isnan()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (1, 2, 3, 0, 4)])
@pytest.mark.parametrize("shape", HEADS)
def test_joined_gradients_are_those_of_the_heads(
    shape: tuple[int, ...], order: tuple[int, ...], compiled: bool
) -> None:
    torch._dynamo.reset()
    s, b, g, r, d = shape
    qkv, bias = draw(s, b, g, r + 2, d, seed=1), draw(g * (r + 2) * d, seed=2)
    grads = []  # with their dimensions in another order in memory
    for seed, count in enumerate((r, 1, 1)):
        like = (s, b, g, count, d)
        stored = draw(*(like[dim] for dim in order), seed=3 + seed)
        grads.append(stored.permute(*(order.index(dim) for dim in range(5))))
    run = torch.compile(split_heads, dynamic=False) if compiled else split_heads
    heads, (of_qkv, of_bias) = gradients(run, [qkv, bias], grads)
    for found, right in zip(heads, qkv.split([r, 1, 1], dim=3), strict=True):
        assert torch.equal(found, right)
    joined = torch.cat(grads, dim=3)
    assert torch.equal(of_qkv, joined)
    assert torch.equal(of_bias, gradients(run, [qkv, bias], grads)[1][1])
    total = joined.double().sum((0, 1)).flatten()
    torch.testing.assert_close(of_bias.double(), total, rtol=2**-8, atol=1e-5)


def module_gradients(build: Callable[[], torch.nn.Module], compiled: bool) -> list[Tensor]:
    """The output and all gradients."""
    torch._dynamo.reset()
    with torch.device("cuda"):
        module = build()
    for seed, parameter in enumerate(module.parameters()):
        parameter.data.copy_(draw(*parameter.shape, seed=seed, dtype=torch.float32) * 0.1)
    module.bfloat16()
    x = draw(256, 2, 256, seed=20).requires_grad_()
    run = torch.compile(module.__call__, dynamic=False, fullgraph=True) if compiled else module
    y = run(x)
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], draw(256, 2, 256, seed=21))]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["mlp", "attention"])
def test_modules_have_the_same_gradients_without(
    monkeypatch: pytest.MonkeyPatch, kind: str, compiled: bool
) -> None:
    config = GPTConfig(
        num_layers=1,
        hidden_size=256,
        num_attention_heads=4,
        seq_length=256,
        attention_dropout=0.0,
    )
    build = {"mlp": lambda: MLP(config), "attention": lambda: SelfAttention(config, 0)}[kind]
    found, again = module_gradients(build, compiled), module_gradients(build, compiled)
    for module in (mlp, attention):
        monkeypatch.setattr(module, "gives_bias_grads", lambda x: False)
    expected = module_gradients(build, compiled)
    for ours, repeated, right in zip(found, again, expected, strict=True):
        if kind == "mlp":  # torch's attention adds up in any order
            assert torch.equal(ours, repeated)
        assert relative_error(ours, right) < 1e-2
