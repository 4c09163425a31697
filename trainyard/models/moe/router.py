"""The router of a mixture of experts: chooses, keeps the balance, and counts.

t tokens of this rank, e experts, k experts that a token visits, h hidden."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainyard.models.config import TransformerConfig
from trainyard.models.moe import balance, routing
from trainyard.models.moe.report import BALANCE_LOSS, NUM_FIGURES, Z_LOSS, num_sums
from trainyard.models.moe.routing import Routing
from trainyard.models.step_module import StepModule, with_loss
from trainyard.parallel.model import ModelParallel, group_size
from trainyard.parallel.sharding import mark_partial_grad

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Router(StepModule):
    """weight: (e, h), whole on every rank. expert_bias: (e) fp32, on the scores of the choice.

    Its sums are those of `report`."""

    expert_bias: Tensor | None

    def __init__(self, config: TransformerConfig, layer: int, parallel: ModelParallel) -> None:
        moe = config.experts
        assert moe.num_experts is not None
        super().__init__(layer, num_sums(moe))
        self.moe, self.parallel, self.num_experts = moe, parallel, moe.num_experts
        self._choices = balance.StepChoices()
        self.weight = nn.Parameter(torch.empty(self.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(self.num_experts)) if config.linear_bias else None
        bias = None
        if moe.moe_router_enable_expert_bias:
            bias = torch.zeros(self.num_experts, dtype=torch.float32)
        self.register_buffer("expert_bias", bias)
        if parallel.sequence_parallel:
            mark_partial_grad(self.weight)
            if self.bias is not None:
                mark_partial_grad(self.bias)

    def forward(self, x: Tensor, num_sequences: int) -> tuple[Routing, Tensor | None]:
        """x: (t, h), the sequences of a place beside each other. Returns the routing, and (t, k)
        bool, which choices an expert takes; None for all."""
        logits = self._logits(x)
        chosen = routing.choose(logits, self.moe, self.expert_bias)
        limit = routing.capacity(x.shape[0], self.moe)
        kept = None if limit is None else routing.within_capacity(chosen, limit, self.moe)
        if self.is_recording:
            self._count(chosen, kept)
        if self.training and torch.is_grad_enabled():
            chosen = self._with_losses(chosen, logits, num_sequences)
        return chosen, kept

    def begin_step(self, loss_weight: float, *, per_token: bool) -> None:
        """Forget the last step."""
        super().begin_step(loss_weight, per_token=per_token)
        self._choices = balance.StepChoices()

    def _logits(self, x: Tensor) -> Tensor:
        dtype = DTYPES.get(self.moe.moe_router_dtype or "", x.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return functional.linear(x.to(dtype), self.weight.to(dtype), bias)

    @torch.no_grad()
    def _count(self, chosen: Routing, kept: Tensor | None) -> None:
        self.sums[: self.num_experts] += routing.counts(chosen.experts, self.num_experts)
        if kept is not None:
            # Numbers that are not counted instead of a selection, which would wait for the device.
            dropped = chosen.experts.masked_fill(kept, self.num_experts)
            first = self.num_experts + NUM_FIGURES
            self.sums[first:] += routing.counts(dropped, self.num_experts)

    def _with_losses(self, chosen: Routing, logits: Tensor, num_sequences: int) -> Routing:
        """The routing, whose backward pass adds the gradients of the losses."""
        moe, weights = self.moe, chosen.weights
        factor = self.loss_weight
        if self.per_token:
            factor *= logits.shape[0] * group_size(self.parallel.tokens)
        if moe.moe_aux_loss_coeff and moe.moe_router_load_balancing_type != "none":
            scores = routing.balance_scores(logits, moe)
            loss = balance.balance_loss(scores, num_sequences, moe, self.parallel, self._choices)
            weights = with_loss(weights, loss, factor * moe.moe_aux_loss_coeff)
            self._record(BALANCE_LOSS, loss)
        if moe.moe_z_loss_coeff:
            loss = balance.z_loss(logits, self.parallel)
            weights = with_loss(weights, loss, factor * moe.moe_z_loss_coeff)
            self._record(Z_LOSS, loss)
        return Routing(weights, chosen.experts)

    def _record(self, figure: int, loss: Tensor) -> None:
        if self.is_recording:
            self.sums[self.num_experts + figure] += loss.detach()

    @torch.no_grad()
    def finish_step(self, sums: Sequence[float]) -> None:
        """Move the bias of each expert towards an even load (arXiv:2408.15664, algorithm 1)."""
        if self.expert_bias is None:
            return
        load = torch.tensor(sums[: self.num_experts], dtype=torch.float64)
        moves = torch.sign(load.mean() - load).float() * self.moe.moe_router_bias_update_rate
        self.expert_bias += moves.to(self.expert_bias.device)
