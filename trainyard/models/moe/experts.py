"""The routed experts that a rank holds: an MLP each, their matrices stacked.

e experts of this rank, r rows, h hidden, f width of an expert, n ranks that share a matrix."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainyard.fp8.delayed import DelayedScaling
from trainyard.fp8.recipe import Fp8Recipe
from trainyard.models.config import TransformerConfig
from trainyard.models.mlp import activation_of
from trainyard.models.moe.grouped import fp8_grouped_linear, grouped_linear
from trainyard.parallel.model import ExpertParallel, ModelParallel
from trainyard.parallel.sharding import Shard, even_cut, mark_expert, mark_shard


class ExpertLinear(nn.Module):
    """The same linear map of every expert. weight: (e, out, in), bias: (e, out) or None.

    fp8, set by models/fp8.py, computes its products in 8 bits; with `delayed`, by scales of past
    steps, which are of all experts of the layer on every rank."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        parallel: ExpertParallel,
        *,
        bias: bool,
        cut: int,
        parts: int = 1,
    ) -> None:
        """shape: of the whole weight, (all experts, out, in). cut: the dim that the ranks of an
        expert share; parts: matrices above each other in it."""
        super().__init__()
        self.fp8: Fp8Recipe | None = None
        self.delayed: DelayedScaling | None = None
        self.num_experts = shape[0]
        self.weight = _parameter(shape, parallel, cut, parts)
        self.first = parallel.ep_rank * self.weight.shape[0]
        """The number of this rank's first expert."""
        self.bias = _parameter(shape[:2], parallel, cut, parts) if bias else None

    def forward(self, rows: Tensor, counts: Tensor, *, fused: bool, share: int = 1) -> Tensor:
        """rows: (r, in) in the order of experts; counts: (e). share: ranks whose results are added
        up, of which each adds its part of the bias."""
        if self.fp8 is None:
            y = grouped_linear(rows, self.weight, counts, fused=fused)
        else:
            y = fp8_grouped_linear(*(rows, self.weight, counts, self.fp8, self.delayed, self.first))
        if self.bias is None:
            return y
        # Its gradient is whole on every rank, since each has the gradient of the sum.
        bias = self.bias if share == 1 else self.bias + (1.0 / share - 1.0) * self.bias.detach()
        return y + bias.repeat_interleave(counts, 0, output_size=rows.shape[0])


def _parameter(
    shape: tuple[int, ...], parallel: ExpertParallel, cut: int, parts: int
) -> nn.Parameter:
    """This rank's part of a stacked parameter."""
    cuts = []
    if parallel.ep_size > 1:
        cuts.append(even_cut(shape, 0, parallel.ep_size, parallel.ep_rank))
    if parallel.tp_size > 1 and cut < len(shape):
        cuts.append(even_cut(shape, cut, parallel.tp_size, parallel.tp_rank, parts))
    shard = Shard(shape, tuple(cuts))
    parameter = nn.Parameter(torch.empty(shard.local_shape))
    if cuts:
        mark_shard(parameter, shard)
    mark_expert(parameter)
    return parameter


class Experts(nn.Module):
    """linear_fc1, activation, linear_fc2 of each expert; gated: rows of linear_fc1 are [gate;
    up]."""

    def __init__(self, config: TransformerConfig, parallel: ModelParallel) -> None:
        super().__init__()
        moe, spread = config.experts, parallel.experts
        assert moe.num_experts is not None
        count, h, f = moe.num_experts, config.hidden_size, config.expert_ffn_size
        parts = 2 if config.gated else 1
        bias = config.linear_bias
        self.fused, self.share = moe.moe_grouped_gemm, spread.tp_size
        self.linear_fc1 = ExpertLinear((count, parts * f, h), spread, bias=bias, cut=1, parts=parts)
        self.activation = activation_of(config)
        self.linear_fc2 = ExpertLinear((count, h, f), spread, bias=bias, cut=2)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows: (r, h) in the order of experts, counts: (e) of them. Returns (r, h), a summand
        where ranks share an expert."""
        inside = self.activation(self.linear_fc1(rows, counts, fused=self.fused))
        out: Tensor = self.linear_fc2(inside, counts, fused=self.fused, share=self.share)
        return out
