"""What is recomputed or offloaded gives the same bits as what is kept, and keeps less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from tests.trainyard.models import small_gpt
from tests.trainyard.models.small_gpt import VOCAB
from trainyard.models import offload
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import init_parameters

SMALL = small_gpt.SMALL | {"hidden_dropout": 0.2, "attention_dropout": 0.2}
LLAMA = small_gpt.LLAMA | {"qk_layernorm": True}
WAYS: dict[str, dict[str, Any]] = {
    "core attention": {"recompute_activations": True},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    "norms": {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
    "all modules": {
        "recompute_granularity": "selective",
        "recompute_modules": ("core_attn", "mlp", "layernorm"),
    },
    "layer by layer": {"recompute_granularity": "full"},
    "three and one": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 3,
    },
    "first two": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 2,
    },
    "offload": {"cpu_offloading_num_layers": 3},
}


@pytest.fixture(autouse=True)
def offload_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALLEST_BYTES", 0)


class Kept:
    """Storages that a forward pass makes, as far as hooks and norms show them."""

    def __init__(self, model: GPTModel) -> None:
        self.saved: dict[int, int] = {}
        self.norms: list[StorageWeakRef] = []
        for name, module in model.named_modules():
            if name.endswith(("input_layernorm", "pre_mlp_layernorm")):
                module.register_forward_hook(self._note)

    def _note(self, module: torch.nn.Module, args: Any, out: torch.Tensor) -> None:
        self.norms.append(StorageWeakRef(out.untyped_storage()))

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self.saved[storage.data_ptr()] = storage.nbytes()
        return tensor


def step(kind: dict[str, Any], **changes: Any) -> tuple[list[torch.Tensor], int, int]:
    """Losses and gradients of a training pass, the bytes kept for its backward, and how many of
    its normalised tensors lived on after the forward."""
    model = GPTModel(GPTConfig(**(SMALL | kind | changes)), VOCAB)
    init_parameters(model, 3)
    tokens = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))
    kept = Kept(model)
    torch.manual_seed(0)
    with saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        losses = model.loss(tokens, tokens.roll(-1, 1), dropout_seed=torch.tensor(11))
    alive = sum(not norm.expired() for norm in kept.norms)
    losses.mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return [losses.detach(), *gradients], sum(kept.saved.values()), alive


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("kind", [{}, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_the_same_bits_in_less_memory(kind: dict[str, Any], way: dict[str, Any]) -> None:
    expected, kept_plainly, norms = step(kind)
    measured, kept, norms_now = step(kind, **way)
    assert norms == 8
    assert kept < kept_plainly
    if "layernorm" in way.get("recompute_modules", ()):
        assert norms_now == 0
    for ours, plain in zip(measured, expected, strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_evaluation_recomputes_nothing(way: dict[str, Any]) -> None:
    model = GPTModel(GPTConfig(**(SMALL | way)), VOCAB).eval()
    init_parameters(model, 3)
    tokens = torch.arange(16).unsqueeze(0)
    plain = GPTModel(GPTConfig(**SMALL), VOCAB).eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(tokens), plain(tokens))


@pytest.mark.slow
def test_a_full_recompute_keeps_least() -> None:
    sizes = [step(LLAMA, **WAYS[way])[1] for way in ("three and one", "layer by layer", "mlp")]
    assert sizes[0] < sizes[1] < sizes[2]
