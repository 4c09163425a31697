"""Cutting sequences over ranks, and exchanging parts of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from trainyard.errors import ConfigError
from trainyard.parallel.context.ring_attention import ring_block
from trainyard.parallel.context.split import (
    cut_sequence,
    gather_sequences,
    heads_to_sequence,
    join_sequence,
    local_positions,
    sequence_to_heads,
)
from trainyard.testing.pool import RankPool

SIZES = [1, 2, 3, 4, 8]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("cp_size", SIZES)
@pytest.mark.parametrize("dim", [0, 1])
def test_joining_undoes_cutting(cp_size: int, dim: int) -> None:
    whole = random(48, 48, 2)
    parts = [cut_sequence(whole, dim, cp_size, rank) for rank in range(cp_size)]
    assert all(part.shape[dim] == 48 // cp_size for part in parts)
    assert torch.equal(join_sequence(parts, dim), whole)


def test_a_rank_has_an_early_and_a_late_piece() -> None:
    assert local_positions(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert local_positions(8, 2, 1).tolist() == [2, 3, 4, 5]
    assert local_positions(8, 1, 0).tolist() == list(range(8))


@pytest.mark.parametrize("cp_size", SIZES[1:])
def test_every_rank_has_as_much_causal_work(cp_size: int) -> None:
    seen = [int((local_positions(48, cp_size, rank) + 1).sum()) for rank in range(cp_size)]
    assert len(set(seen)) == 1


@pytest.mark.parametrize("length", [0, 2, 6, 13])
def test_a_length_that_cannot_be_cut_is_refused_with_the_nearest(length: int) -> None:
    with pytest.raises(ConfigError, match=r"2 x --context-parallel-size \(2\) = 4.*do") as refusal:
        cut_sequence(torch.zeros(length), 0, 2, 0)
    assert length < 4 or f"{length // 4 * 4} and" in str(refusal.value)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cp_size", SIZES[1:])
def test_the_ring_computes_every_needed_pair_once_and_evenly(cp_size: int, causal: bool) -> None:
    s = 4
    pairs = torch.zeros(s * cp_size, s * cp_size, dtype=torch.int64)
    for step in range(cp_size):
        areas = set()
        for rank in range(cp_size):
            block = ring_block(step, rank, cp_size, s, causal)
            queries = local_positions(s * cp_size, cp_size, rank)[block.queries]
            keys = local_positions(s * cp_size, cp_size, (rank - step) % cp_size)[block.keys]
            done = torch.ones(len(queries), len(keys), dtype=torch.int64)
            done = done.tril() if block.causal else done
            pairs[queries.unsqueeze(1), keys] += done
            areas.add(int(done.sum()))
        assert len(areas) == 1
    expected = torch.ones_like(pairs)
    assert torch.equal(pairs, expected.tril() if causal else expected)


# --- on several ranks -------------------------------------------------------------------------


def check_exchanges() -> None:
    group = dist.group.WORLD
    assert group is not None
    size, rank = dist.get_world_size(), dist.get_rank()
    whole = [random(2, 8, 16, 3), random(2, 4, 16, 5, seed=1)]
    weights = [random(*x.shape, seed=2 + rank) for x in whole]
    parts = [cut_sequence(x, 2, size, rank).requires_grad_() for x in whole]

    gathered = gather_sequences(parts, group)
    assert all(torch.equal(got, x) for got, x in zip(gathered, whole, strict=True))
    grads = torch.autograd.grad(gathered, parts, weights)
    for got, x in zip(grads, whole, strict=True):
        total = torch.stack([random(*x.shape, seed=2 + other) for other in range(size)]).sum(0)
        torch.testing.assert_close(got, cut_sequence(total, 2, size, rank))

    heads = sequence_to_heads(parts, group)
    for got, x in zip(heads, whole, strict=True):
        assert torch.equal(got, x.chunk(size, 1)[rank])
    back = [heads_to_sequence(x, group) for x in heads]
    assert all(torch.equal(got, part) for got, part in zip(back, parts, strict=True))
    given = [random(*part.shape, seed=9 + rank) for part in parts]
    for got, x in zip(torch.autograd.grad(back, parts, given), given, strict=True):
        assert torch.equal(got, x)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 4])
def test_sequences_are_gathered_and_exchanged_for_heads(ranks: RankPool, world_size: int) -> None:
    ranks.run(check_exchanges, world_size)
