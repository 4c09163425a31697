"""A model whose activation, and whose split of queries, keys and values, give the gradients of the
biases before them. Kernels do that on GPUs (tests/gpu/test_bias_grads.py), torch here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainyard.models.perturbed import perturb
from tests.trainyard.models.small_gpt import LLAMA, SMALL, VOCAB
from trainyard.models import attention, bias_grads, mlp
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import init_parameters
from trainyard.testing.tolerances import FP32_SUM_ORDER

TWO_LAYERS = {"num_layers": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "exact, groups": {
        "bias_gelu_fusion": False,
        "group_query_attention": True,
        "num_query_groups": 2,
    },
    "squared relu, mlp recomputed": {
        "squared_relu": True,
        "recompute_granularity": "selective",
        "recompute_modules": ("core_attn", "mlp"),
    },
    "quick gelu, all recomputed": {"quick_gelu": True, "recompute_granularity": "full"},
    "llama": LLAMA,
}
RECOMPUTED = [kind for kind in KINDS if kind.endswith("recomputed")]


class Counted:
    """What the kernels compute, by torch."""

    def __init__(self) -> None:
        self.activations, self.joined = 0, 0

    def forward(self, x: Tensor, kind: str) -> Tensor:
        self.activations += 1
        return mlp.ACTIVATIONS[kind](x)

    def backward(self, grad: Tensor, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (out,) = torch.autograd.grad(mlp.ACTIVATIONS[kind](leaf), leaf, grad)
        return out, out.flatten(0, 1)

    def join(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.joined += 1
        out = torch.cat([q, k, v], dim=3)
        return out, out.flatten(2).flatten(0, 1)


def gradients(settings: dict[str, Any]) -> dict[str, Tensor]:
    config = GPTConfig(**(SMALL | TWO_LAYERS | settings))
    model = GPTModel(config, VOCAB)
    init_parameters(model, 3)
    perturb(model, seed=4, scale=0.1)
    tokens = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(5))
    model.loss(tokens, tokens.roll(-1, 1)).mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_gets_its_gradient_once(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    right, by_torch = gradients(KINDS[kind]), Counted()
    for module in (mlp, attention):
        monkeypatch.setattr(module, "gives_bias_grads", lambda x: torch.is_grad_enabled())
    for name, stand_in in (
        ("_forward_op", by_torch.forward),
        ("_backward_op", by_torch.backward),
        ("_join_op", by_torch.join),
    ):
        monkeypatch.setattr(bias_grads, name, stand_in)
    found = gradients(KINDS[kind])
    biased = 0 if kind == "llama" else 2
    assert by_torch.joined == biased
    assert by_torch.activations == (2 * biased if kind in RECOMPUTED else biased)
    assert found.keys() == right.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, right[name], **FP32_SUM_ORDER)
