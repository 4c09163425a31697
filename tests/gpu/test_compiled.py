"""Layers on a GPU in bf16: a compiler takes them whole, whatever they are made of.

python -m pytest -m gpu tests/gpu"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trainyard.models.small_gpt import LLAMA
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import init_parameters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB, LENGTH = 1024, 256
SMALL: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "seq_length": LENGTH,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.0,
}
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "gpt attention dropout": {"attention_dropout": 0.1},
    "llama": LLAMA,
    "qwen3": LLAMA | {"qk_layernorm": True},
    "mistral": LLAMA | {"window_size": "63,0"},
    "sink": LLAMA | {"softmax_type": "learnable"},
    "recomputed": LLAMA | {"recompute_granularity": "full"},
    "core recomputed": LLAMA | {"recompute_granularity": "selective"},
    "offloaded": LLAMA | {"cpu_offloading_num_layers": 2},
}


def step(model: GPTModel) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(4 * LENGTH, device="cuda").view(4, LENGTH) * 7 % VOCAB
    torch.cuda.manual_seed(1)
    losses = model.loss(tokens, tokens.roll(-1, 1), dropout_seed=torch.tensor(11, device="cuda"))
    losses.mean().backward()
    grads = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
    return losses.detach().mean(), torch.stack(grads)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_compiles_without_a_break(kind: str) -> None:
    torch._dynamo.reset()
    config = GPTConfig(**(SMALL | KINDS[kind]))
    with torch.device("cuda"):
        plain, compiled = GPTModel(config, VOCAB), GPTModel(config, VOCAB)
    for model in (plain, compiled):
        init_parameters(model, 3)
        model.bfloat16()
    for layer in compiled.decoder.layers.values():
        layer.forward = torch.compile(layer.forward, dynamic=False, fullgraph=True)
    compiled.losses = torch.compile(compiled.losses, fullgraph=True)  # type: ignore[method-assign]
    loss, grads = step(compiled)
    right, right_grads = step(plain)
    dropped = config.attention_dropout > 0  # drawn in another order
    assert float(loss) == pytest.approx(float(right), rel=0.05 if dropped else 2e-3)
    if not dropped:
        torch.testing.assert_close(grads, right_grads, rtol=0.05, atol=1e-3)
