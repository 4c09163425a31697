"""Brings tokens to their experts, wherever those are, and the results back.

Two ways with the same result: every rank sends each token to the ranks of its experts (alltoall),
or every rank gathers all tokens and keeps those of its experts (allgather). Ranks that share the
matrices of an expert get the same rows, and their results are added up.

t tokens of this rank, k experts that a token visits, h channels, n ranks of the group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainyard.models.moe.routing import Routing
from trainyard.models.moe.rows import Rows, rows_of
from trainyard.parallel.expert.exchange import (
    counts_of_all,
    exchange_rows,
    gather_tokens,
    scatter_sums,
)
from trainyard.parallel.model import ExpertParallel
from trainyard.parallel.tensor.collectives import all_gather

RunExperts = Callable[[Tensor, Tensor], Tensor]
"""(rows (r, h) in the order of this rank's experts, (e) rows of each) -> (r, h)."""


def through_experts(
    x: Tensor,
    routing: Routing,
    kept: Tensor | None,
    run: RunExperts,
    num_experts: int,
    parallel: ExpertParallel,
    *,
    gather: bool,
    pad_to: int | None = None,
) -> Tensor:
    """The weighted results of each token's experts, (t, h). x: (t, h). kept: (t, k) bool, choices
    that an expert takes; None: all. gather: by gathering all tokens. pad_to: rows that every expert
    gets of this rank."""
    if gather and parallel.group is not None:
        return _by_gathering(x, routing, kept, run, num_experts, parallel)
    rows = rows_of(routing.experts, num_experts, kept, pad_to)
    found = rows.spread(x)
    if parallel.group is None:
        results = run(found, rows.counts)
    else:
        results = _by_exchange(found, rows.counts, run, parallel)
    return rows.combine(results, routing.weights)


def _by_exchange(
    found: Tensor, counts: Tensor, run: RunExperts, parallel: ExpertParallel
) -> Tensor:
    """Rows in the order of all experts, through those experts."""
    of_ranks = counts_of_all(counts, parallel.group).view(
        -1, parallel.ep_size, _local(counts, parallel)
    )
    numbers: list[list[list[int]]] = of_ranks.tolist()  # waits for the device
    own = numbers[torch.distributed.get_rank(parallel.group)]
    for_part = [sum(part) for part in own]
    send = [for_part[ep] for ep in parallel.ep_of_rank]
    receive = [sum(parts[parallel.ep_rank]) for parts in numbers]
    outgoing = _for_ranks(found, for_part, parallel.ep_of_rank)
    arrived = exchange_rows(outgoing, send, receive, parallel.group)
    of_expert = _experts_of_arrived(of_ranks[:, parallel.ep_rank], sum(receive))
    local = rows_of(of_expert.unsqueeze(1), of_ranks.shape[2])
    results = local.collect(run(local.spread(arrived), local.counts)).squeeze(1)
    returned = exchange_rows(results, receive, send, parallel.group)
    return _of_ranks(returned, send, parallel.ep_of_rank)


def _local(counts: Tensor, parallel: ExpertParallel) -> int:
    """Experts of a rank."""
    return len(counts) // parallel.ep_size


def _for_ranks(found: Tensor, for_part: Sequence[int], ep_of_rank: Sequence[int]) -> Tensor:
    """Rows in the order of the ranks that get them; several get the same if they share experts."""
    if list(ep_of_rank) == list(range(len(for_part))):
        return found
    parts = found.split(list(for_part))
    return torch.cat([parts[ep] for ep in ep_of_rank])


def _of_ranks(returned: Tensor, send: Sequence[int], ep_of_rank: Sequence[int]) -> Tensor:
    """The results in the order of experts, those of ranks that share experts added up."""
    if list(ep_of_rank) == list(range(len(send))):
        return returned
    sums: dict[int, Tensor] = {}
    for ep, part in zip(ep_of_rank, returned.split(list(send)), strict=True):
        sums[ep] = sums[ep] + part if ep in sums else part
    return torch.cat([sums[ep] for ep in sorted(sums)])


def _experts_of_arrived(counts: Tensor, total: int) -> Tensor:
    """(total) number of the local expert of each row. counts: (n, e) rows from each rank."""
    n, e = counts.shape
    numbers = torch.arange(e, device=counts.device).repeat(n)
    return numbers.repeat_interleave(counts.flatten(), output_size=total)


def _by_gathering(
    x: Tensor,
    routing: Routing,
    kept: Tensor | None,
    run: RunExperts,
    num_experts: int,
    parallel: ExpertParallel,
) -> Tensor:
    """All tokens of the group, of which this rank takes those of its experts."""
    everyone = gather_tokens(x, parallel.group)
    weights = gather_tokens(routing.weights, parallel.group)
    experts = all_gather(routing.experts, parallel.group)
    size = num_experts // parallel.ep_size
    local = experts - parallel.ep_rank * size
    ours = (local >= 0) & (local < size)
    if kept is not None:
        ours &= all_gather(kept.to(torch.uint8), parallel.group).bool()
    rows: Rows = rows_of(local.clamp(0, size - 1), size, ours)
    results = run(rows.spread(everyone), rows.counts)
    return scatter_sums(rows.combine(results, weights), parallel.group)
