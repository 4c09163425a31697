"""Our backward pass of LayerNorm and RMSNorm against torch's, each held against fp64.

python -m pytest -m gpu tests/gpu/test_norm_backward.py"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainyard.models.block import TransformerLayer
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.layer_inputs import LayerInputs
from trainyard.models.norm import NORMS, forked
from trainyard.models.norms.own_backward import OwnBackward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

kinds = pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
SHAPES = [(4097, 1024), (3, 512), (1000, 1600), (601, 2048), (300, 5120), (70, 8192), (33, 12288)]
WORSE = 1.5
"""How far from fp64 ours may be, beside torch's distance."""


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda")


class Fork(nn.Module):
    """A norm and the residual stream beside it."""

    def __init__(self, kind: str, width: int, centred: bool, own: bool) -> None:
        super().__init__()
        kernel = OwnBackward() if own else None
        self.norm = NORMS[kind](width, 1e-5, centred=centred, kernel=kernel).cuda()
        with torch.no_grad():
            for number, parameter in enumerate(self.norm.parameters()):
                parameter.copy_(0.3 * draw(width, seed=number) + (0.0 if centred else 1.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        stream, normalised = forked(self.norm, x)
        return 2 * stream, normalised


def gradients(module: Fork, run: Any, x: Tensor, grad: Tensor, stream: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    wide, normalised = run(x)
    return list(
        torch.autograd.grad(
            (wide, normalised),
            [x, *module.parameters()],
            (stream.to(wide.dtype), grad.to(normalised.dtype)),
        )
    )


def distances(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [
        float((ours.double() - right).norm() / right.norm())
        for ours, right in zip(found, exact, strict=True)
    ]


@kinds
@pytest.mark.parametrize("shape", [*SHAPES, (40, 16384)])
@pytest.mark.parametrize("fp32_stream", [False, True])
@pytest.mark.parametrize("centred", [False, True])
def test_gradients_are_as_near_to_fp64_as_torchs(
    kind: str, shape: tuple[int, int], fp32_stream: bool, centred: bool
) -> None:
    rows, width = shape
    x, grad, stream = (draw(rows, width, seed=seed) for seed in (5, 6, 7))
    x, grad, stream = (2 * x + 3).bfloat16(), grad.bfloat16(), stream.bfloat16()
    found = {}
    for own in (True, False):
        module = Fork(kind, width, centred, own).bfloat16()
        found[own] = gradients(module, module, x.float() if fp32_stream else x, grad, stream)
    exact = Fork(kind, width, centred, own=False).bfloat16().double()
    right = gradients(exact, exact, x.double(), grad, stream)
    again = Fork(kind, width, centred, own=True).bfloat16()
    repeated = gradients(again, again, x.float() if fp32_stream else x, grad, stream)
    for ours, second in zip(found[True], repeated, strict=True):
        assert torch.equal(ours, second)
    for ours, theirs in zip(
        distances(found[True], right), distances(found[False], right), strict=True
    ):
        assert ours <= WORSE * theirs + 1e-7


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_compiler_takes_it_whole(kind: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    module = Fork(kind, 1024, centred=True, own=True).to(dtype)
    x, grad, stream = (draw(50, 3, 1024, seed=seed).to(dtype) for seed in (5, 6, 7))
    compiled: Any = torch.compile(module.forward, fullgraph=True)
    found = gradients(module, compiled, x, grad, stream)
    right = gradients(module, module, x, grad, stream)
    near = 1e-5 if dtype == torch.float32 else 5e-3
    for distance in distances(found, [tensor.double() for tensor in right]):
        assert distance < near


@kinds
@pytest.mark.parametrize("options", [{}, {"fp32_residual_connection": True}])
def test_a_compiled_layer_has_the_gradients_of_torchs(kind: str, options: dict[str, Any]) -> None:
    config = {"num_layers": 1, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 64}
    config |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "normalization": kind}
    found = []
    for backend in ("auto", "torch"):
        torch._dynamo.reset()
        layer = TransformerLayer(GPTConfig(**config, **options, norm_backend=backend), 0)
        layer = layer.cuda().bfloat16()
        assert isinstance(layer.pre_mlp_layernorm.kernel, OwnBackward) == (backend == "auto")
        for number, parameter in enumerate(layer.parameters()):
            with torch.no_grad():
                parameter.copy_(0.02 * draw(*parameter.shape, seed=number))
                if parameter.dim() == 1:
                    parameter.add_(0.5)
        run: Any = torch.compile(layer.forward, fullgraph=True)
        x = draw(64, 4, 1024, seed=50).to(torch.float32 if options else torch.bfloat16)
        x.requires_grad_()
        y = run(x, LayerInputs())
        leaves = [x, *layer.parameters()]
        grad = draw(64, 4, 1024, seed=51).to(y.dtype)
        found.append([y, *torch.autograd.grad(y, leaves, grad)])
    for distance in distances(found[0], [tensor.double() for tensor in found[1]]):
        assert distance < 1e-2
