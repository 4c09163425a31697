"""Relative positions: a learned number for every head and every distance, added to the scores of
attention (arXiv:1910.10683, section 2.1).

s queries, t keys, n heads of this rank."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from trainyard.models.attention import own_heads
from trainyard.models.embedding import Table
from trainyard.models.t5.config import T5Config
from trainyard.parallel.model import ModelParallel
from trainyard.parallel.sharding import mark_partial_grad


class RelativePositions(nn.Module):
    """The table of distances of an encoder, which looks both ways, or of a decoder. All layers
    share it; it is whole on every rank, which uses the columns of its heads."""

    def __init__(self, config: T5Config, parallel: ModelParallel, *, both_ways: bool) -> None:
        super().__init__()
        heads = own_heads(config, parallel)
        self.columns = slice(parallel.tp_rank * heads, (parallel.tp_rank + 1) * heads)
        self.num_buckets = config.relative_attention_num_buckets
        self.max_distance = config.relative_attention_max_distance
        self.both_ways = both_ways
        self.relative_attention_bias = Table(self.num_buckets, config.num_attention_heads)
        if parallel.tp_size > 1:
            mark_partial_grad(self.relative_attention_bias.weight)

    def forward(self, length: int, num_new: int | None = None) -> Tensor:
        """(1, n, num_new, length) numbers for the last `num_new` queries, unset all, and every key
        of a sequence."""
        weight = self.relative_attention_bias.weight
        places = torch.arange(length, device=weight.device)
        queries = places if num_new is None else places[length - num_new :]
        buckets = distance_buckets(
            places - queries.unsqueeze(1), self.num_buckets, self.max_distance, self.both_ways
        )
        return weight[:, self.columns][buckets].permute(2, 0, 1).unsqueeze(0)


def distance_buckets(
    distances: Tensor, num_buckets: int, max_distance: int, both_ways: bool
) -> Tensor:
    """The bucket of each distance, int64.

    distances: place of the key minus place of the query. Small distances have a bucket each, larger
    ones share buckets that grow by a constant factor up to `max_distance`. both_ways: half of the
    buckets are for keys to the right; otherwise all of these are distance 0."""
    if both_ways:
        num_buckets //= 2
        first, distances = (distances > 0).long() * num_buckets, distances.abs()
    else:
        first, distances = torch.zeros_like(distances), (-distances).clamp(min=0)
    exact = num_buckets // 2
    growth = torch.log(distances.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    coarse = exact + (growth * (num_buckets - exact)).long()
    return first + torch.where(distances < exact, distances, coarse.clamp(max=num_buckets - 1))
