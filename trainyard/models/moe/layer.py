"""A mixture of experts in place of the MLP of a layer, and the choice between the two.

s sequence (this rank's part of it), b batch, h hidden."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trainyard.models.config import TransformerConfig
from trainyard.models.mlp import MLP
from trainyard.models.moe import routing
from trainyard.models.moe.dispatch import through_experts
from trainyard.models.moe.experts import Experts
from trainyard.models.moe.router import Router
from trainyard.parallel.model import ModelParallel
from trainyard.parallel.sharding import mark_partial_grad


def build_mlp(config: TransformerConfig, layer: int, parallel: ModelParallel) -> nn.Module:
    """The MLP of a layer, or its mixture of experts."""
    if config.has_experts(layer):
        return MixtureOfExperts(config, layer, parallel)
    return MLP(config, parallel)


class MixtureOfExperts(nn.Module):
    """Every token visits the experts that a router chooses, and the shared expert if there is
    one."""

    def __init__(self, config: TransformerConfig, layer: int, parallel: ModelParallel) -> None:
        super().__init__()
        self.moe, self.parallel = config.experts, parallel
        self.router = Router(config, layer, parallel)
        self.experts = Experts(config, parallel)
        width = self.moe.moe_shared_expert_intermediate_size
        self.shared_experts = None if width is None else SharedExperts(config, width, parallel)
        # Not a decorator: it imports the compiler, for which every program would wait a second.
        self._uncompiled: Callable[[MixtureOfExperts, Tensor], Tensor]
        self._uncompiled = torch.compiler.disable(_mixture)

    def forward(self, x: Tensor) -> Tensor:
        """x: (s, b, h). Returns the same shape."""
        return self._uncompiled(self, x)


def _mixture(layer: MixtureOfExperts, x: Tensor) -> Tensor:
    """`forward`, not compiled: how many rows an expert gets differs in every step, for which a
    compiler would compile anew."""
    tokens = x.flatten(0, 1)
    chosen, kept = layer.router(tokens, x.shape[1])
    moe = layer.moe
    if moe.moe_apply_probs_on_input:  # one expert for each token, so its only row
        tokens = (tokens * chosen.weights).to(tokens.dtype)
        chosen = chosen._replace(weights=torch.ones_like(chosen.weights))
    assert moe.num_experts is not None
    pad = moe.moe_pad_expert_input_to_capacity
    out = through_experts(
        tokens,
        chosen,
        kept,
        layer.experts,
        moe.num_experts,
        layer.parallel.experts,
        gather=moe.moe_token_dispatcher_type == "allgather",
        pad_to=routing.capacity(tokens.shape[0], moe) if pad else None,
    ).view_as(x)
    return out if layer.shared_experts is None else out + layer.shared_experts(x)


class SharedExperts(MLP):
    """The expert that every token visits, weighed by sigmoid(gate_weight x) if it has a gate.

    gate_weight: (1, h), whole on every rank."""

    def __init__(self, config: TransformerConfig, width: int, parallel: ModelParallel) -> None:
        super().__init__(config, parallel, width)
        self.gate_weight: nn.Parameter | None = None
        if config.experts.moe_shared_expert_gate:
            self.gate_weight = nn.Parameter(torch.empty(1, config.hidden_size))
            if parallel.sequence_parallel:
                mark_partial_grad(self.gate_weight)

    def forward(self, x: Tensor) -> Tensor:
        """x: (s, b, h). Returns the same shape."""
        out = super().forward(x)
        if self.gate_weight is None:
            return out
        return out * torch.sigmoid(nn.functional.linear(x, self.gate_weight))
