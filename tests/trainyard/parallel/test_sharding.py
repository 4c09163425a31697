"""Parts of parameters: rows of a part are the same numbers as rows of what it takes."""

from __future__ import annotations

import pytest
import torch

from trainyard.parallel.sharding import Cut, Shard, ShardBox, even_shard, rows_of

SHARDS = {
    "whole": None,
    "rows": even_shard((12, 6), 0, 2, 1),
    "gate and up": even_shard((12, 6), 0, 3, 1, parts=2),
    "columns": even_shard((12, 6), 1, 2, 1),
    "experts and their rows": Shard(
        (4, 6, 3),
        (Cut(0, (ShardBox(0, 2, 2),)), Cut(1, (ShardBox(0, 0, 1), ShardBox(1, 3, 1)))),
    ),
}


@pytest.mark.parametrize("name", SHARDS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_rows_of_all_ranks_are_the_part(name: str, num_ranks: int) -> None:
    shard = SHARDS[name]
    shape = (12, 6) if shard is None else shard.shape
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    part = whole if shard is None else shard.take(whole)
    for number, rows in enumerate(part.chunk(num_ranks)):
        first = number * -(-part.shape[0] // num_ranks)
        found = rows_of(tuple(part.shape), shard, first, first + rows.shape[0])
        assert torch.equal(found.take(whole), rows)
        assert found.local_shape == tuple(rows.shape)


def test_a_rank_without_rows_has_no_boxes() -> None:
    assert not list(rows_of((2, 3), None, 2, 2).boxes())
