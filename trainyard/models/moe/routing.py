"""Which experts a token visits, and with which weights. Pure functions.

t tokens, e experts, k experts that a token visits."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trainyard.models.moe_config import MoEConfig

EPSILON = 1e-20
"""Keeps sigmoid scores that are all 0 from being divided by 0."""


class Routing(NamedTuple):
    """The choice of a router."""

    weights: Tensor
    """(t, k) of the chosen experts' outputs."""
    experts: Tensor
    """(t, k) int64, numbers of the chosen experts."""


def choose(logits: Tensor, moe: MoEConfig, bias: Tensor | None = None) -> Routing:
    """The k experts of each token. logits: (t, e); bias: (e), added to the scores of the choice
    only."""
    k = moe.moe_router_topk
    if moe.moe_router_score_function == "sigmoid":
        scores = torch.sigmoid(_wide(logits))
        experts = _top(scores if bias is None else scores + bias, moe)
        weights = scores.gather(1, experts)
        if k > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + EPSILON)
    elif moe.moe_router_pre_softmax:
        scores = _softmax(logits)
        experts = _top(scores, moe)
        weights = scores.gather(1, experts)
    else:
        experts = _top(logits, moe)
        weights = _softmax(logits.gather(1, experts))
    factor = moe.moe_router_topk_scaling_factor
    return Routing(weights if factor is None else weights * factor, experts)


def balance_scores(logits: Tensor, moe: MoEConfig) -> Routing:
    """What the auxiliary loss is about: ((t, e) scores that sum to 1 for each token, (t, k) experts
    of the highest ones), without groups and biases."""
    if moe.moe_router_score_function == "sigmoid":
        scores = torch.sigmoid(_wide(logits))
        scores = scores / (scores.sum(-1, keepdim=True) + EPSILON)
    else:
        scores = _softmax(logits)
    return Routing(scores, scores.topk(moe.moe_router_topk, dim=-1).indices)


def counts(experts: Tensor, num_experts: int) -> Tensor:
    """(num_experts) int64: how often each occurs; larger numbers are not counted."""
    flat = experts.flatten()
    found = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    found.scatter_add_(0, flat.clamp(max=num_experts), torch.ones_like(flat))
    return found[:num_experts]


def capacity(num_tokens: int, moe: MoEConfig) -> int | None:
    """Rows that an expert takes of the tokens of a rank; None: all."""
    factor = moe.moe_expert_capacity_factor
    if factor is None:
        return None
    assert moe.num_experts is not None
    return math.ceil(num_tokens * moe.moe_router_topk / moe.num_experts * factor)


def within_capacity(routing: Routing, limit: int, moe: MoEConfig) -> Tensor:
    """(t, k) bool: which choices are among the first `limit` of their expert, by weight or by
    position."""
    flat = routing.experts.flatten()
    if moe.moe_token_drop_policy == "probs":
        first = routing.weights.detach().flatten().argsort(descending=True, stable=True)
    else:
        first = torch.arange(len(flat), device=flat.device)
    order = first[flat[first].argsort(stable=True)]  # by expert, and within it by preference
    assert moe.num_experts is not None
    ends = counts(flat, moe.num_experts).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    places = torch.arange(len(flat), device=flat.device) - starts[flat[order]]
    kept = torch.empty(len(flat), dtype=torch.bool, device=flat.device)
    kept[order] = places < limit
    return kept.view_as(routing.experts)


def _top(scores: Tensor, moe: MoEConfig) -> Tensor:
    """(t, k) the experts with the highest scores, of the best groups only if there are groups."""
    groups, chosen, k = moe.moe_router_num_groups, moe.moe_router_group_topk, moe.moe_router_topk
    if groups is None or chosen is None:
        return scores.topk(k, dim=-1).indices
    grouped = scores.unflatten(-1, (groups, -1))  # (t, groups, e / groups)
    of_group = grouped.topk(k // chosen, dim=-1).values.sum(-1)
    allowed = torch.zeros_like(of_group, dtype=torch.bool)
    allowed.scatter_(1, of_group.topk(chosen, dim=-1).indices, True)
    masked = grouped.masked_fill(~allowed.unsqueeze(-1), -math.inf)
    best: Tensor = masked.flatten(1).topk(k, dim=-1).indices
    return best


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _softmax(logits: Tensor) -> Tensor:
    return torch.softmax(_wide(logits), dim=-1)
