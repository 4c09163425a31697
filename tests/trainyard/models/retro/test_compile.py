"""A compiler takes each kind of layer of a Retro whole: plain, with cross attention, with the
encoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.trainyard.models.retro.small_retro import build, some_neighbors, some_tokens
from trainyard.models.retro.model import RetroModel

pytestmark = pytest.mark.slow

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "selective": {
        "recompute_granularity": "selective",
        "recompute_modules": ("mlp", "layernorm", "core_attn"),
    },
    "full, fp32 residual": {"recompute_granularity": "full", "fp32_residual_connection": True},
}


def step(model: RetroModel) -> list[torch.Tensor]:
    tokens, neighbors = some_tokens(), some_neighbors(model.config)
    seed = torch.tensor(11)
    losses = model.train().loss(tokens, tokens, dropout_seed=seed, neighbors=neighbors)
    losses.mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [losses.detach(), *gradients]


@pytest.mark.parametrize("kind", KINDS)
def test_layers_compile_whole(kind: str) -> None:
    torch._dynamo.reset()
    no_draws = {"attention_dropout": 0.0, "retro_encoder_attention_dropout": 0.0}
    plain, compiled = (build(**KINDS[kind], **no_draws) for _ in range(2))
    counter = CompileCounterWithBackend("eager")
    for layer in compiled.decoder.layers.values():
        layer.compile(fullgraph=True, backend=counter)
    for ours, theirs in zip(step(compiled), step(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 3
