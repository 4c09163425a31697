"""What a plan says that layers keep for the backward pass lives on after a forward pass, with every
way to recompute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainyard.models.costs.memory_detail import detailed_memory
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import init_parameters
from trainyard.models.moe_config import MoEConfig
from trainyard.models.parallel_layout import ParallelLayout

TINY: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
ROWS, SAMPLES = 64, 2
TOKENS = SAMPLES * TINY["seq_length"]
OF_A_LAYER, OF_EXPERTS = 0.01, 0.06
"""Relative. Plans count kernels of GPUs, so models whose kernels on a CPU keep more are left out:
grouped queries, RMSNorm and rotation."""
SELECTIVE = {"recompute_granularity": "selective"}
WAYS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "core attention": {"recompute_activations": True},
    "mlp": SELECTIVE | {"recompute_modules": ("mlp",)},
    "norms": SELECTIVE | {"recompute_modules": ("layernorm",)},
    "all modules": SELECTIVE | {"recompute_modules": ("core_attn", "mlp", "layernorm")},
    "every layer": {"recompute_granularity": "full"},
    "two layers at once": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
    "the first two layers": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 2,
    },
}


class Made(TorchDispatchMode):
    """Knows every storage that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self._sizes[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def alive(self, model: GPTModel) -> int:
        """Bytes of those that live, but for the weights."""
        weights = {p.untyped_storage()._cdata for p in model.parameters()}
        return sum(
            size
            for key, (storage, size) in self._sizes.items()
            if key not in weights and not storage.expired()
        )


def measured(options: dict[str, Any], dtype: torch.dtype) -> int:
    """Bytes that live on before the backward pass."""
    model = GPTModel(GPTConfig(**options), ROWS)
    init_parameters(model, 1)
    model.to(dtype)
    tokens = torch.zeros(SAMPLES, TINY["seq_length"], dtype=torch.long)
    with Made() as made:
        losses = model.loss(tokens, tokens, dropout_seed=torch.tensor(11))
    assert losses.requires_grad
    return made.alive(model)


def of_a_layer(count: Callable[[dict[str, Any]], float], options: dict[str, Any]) -> float:
    """Bytes a token, of models of two sizes."""
    sizes = [count(TINY | options | {"num_layers": layers}) for layers in (4, 8)]
    return (sizes[1] - sizes[0]) / 4 / TOKENS


def check(options: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    layout = ParallelLayout(fp32=dtype == torch.float32, micro_batch_size=SAMPLES)

    def planned(options: dict[str, Any]) -> float:
        return detailed_memory(GPTConfig(**options), ROWS, layout).activations

    found = of_a_layer(lambda options: measured(options, dtype), options)
    assert of_a_layer(planned, options) == pytest.approx(found, rel=tolerance)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["quick_geglu", "quick_gelu", "squared_relu", "swiglu"])
def test_a_layer_keeps_what_its_activation_needs(activation: str, dtype: torch.dtype) -> None:
    check({activation: True}, dtype, OF_A_LAYER)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_what_is_computed_again_is_not_kept(way: dict[str, Any], dtype: torch.dtype) -> None:
    check(way, dtype, OF_A_LAYER)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_keep_the_rows_that_visit_them(dtype: torch.dtype) -> None:
    check({"moe": MoEConfig(num_experts=4, moe_router_topk=2)}, dtype, OF_EXPERTS)
