"""Losses that keep a router balanced and its logits small.

Each rank computes the part of its tokens; the parts of the ranks that share a micro-batch add up to
the loss. Factors are left out.

t tokens of this rank (s of a sequence, b sequences), e experts, k experts that a token visits."""

from __future__ import annotations

import torch
from torch import Tensor

from trainyard.models.moe.routing import Routing, counts
from trainyard.models.moe_config import MoEConfig
from trainyard.models.recompute import is_recomputing
from trainyard.parallel.model import ModelParallel, group_size
from trainyard.parallel.tensor.collectives import all_reduce


class StepChoices:
    """How often each expert was chosen in the micro-batches of a step so far, over all replicas: a
    mean over micro-batches. A recomputed forward pass gets what the first one got."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._means: list[Tensor] = []
        self._num_repeated = 0

    def add(self, chosen: Tensor) -> Tensor:
        """The mean with one more micro-batch. Recomputation repeats micro-batches in their
        order."""
        if is_recomputing():
            self._num_repeated += 1
            return self._means[self._num_repeated - 1]
        self._total = chosen if self._total is None else self._total + chosen
        self._means.append(self._total / (len(self._means) + 1))
        return self._means[-1]


def balance_loss(
    scores: Routing,
    num_sequences: int,
    moe: MoEConfig,
    parallel: ModelParallel,
    of_step: StepChoices | None = None,
) -> Tensor:
    """e sum_i f_i P_i, () fp32, at least about 1 where all experts get as much (arXiv:2101.03961):
    f_i the share of choices that fell on expert i, P_i its mean score.

    scores: (t, e) and (t, k), token-major with the sequences of a place beside each other. Shares
    are over the micro-batch, each sequence, or the step so far (`of_step`)."""
    kind, k, e = moe.moe_router_load_balancing_type, moe.moe_router_topk, moe.num_experts
    assert e is not None
    num_parts = group_size(parallel.tokens)
    t = scores.weights.shape[0]
    if kind == "seq_aux_loss":
        s = t // num_sequences
        sums = scores.weights.view(s, num_sequences, e).sum(0)
        offsets = torch.arange(num_sequences, device=sums.device).view(1, -1, 1) * e
        placed = scores.experts.view(s, num_sequences, k) + offsets
        chosen = counts(placed, num_sequences * e).view(num_sequences, e).to(sums.dtype)
        chosen = all_reduce(chosen, parallel.tokens)
        whole = s * num_parts
        return (sums * chosen).sum() * e / (k * whole * whole * num_sequences)
    sums, chosen = scores.weights.sum(0), counts(scores.experts, e).to(scores.weights.dtype)
    of_choices = parallel.same_time if kind == "global_aux_loss" else parallel.tokens
    chosen = all_reduce(chosen, of_choices)
    if kind == "global_aux_loss" and of_step is not None:
        chosen = of_step.add(chosen)
    all_choices = k * t * group_size(of_choices)
    return (sums * chosen).sum() * e / (all_choices * t * num_parts)


def z_loss(logits: Tensor, parallel: ModelParallel) -> Tensor:
    """Mean square of the log-sum-exp of the logits (t, e), () (arXiv:2202.08906, equation 5)."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.logsumexp(wide, dim=-1).square().mean() / group_size(parallel.tokens)
