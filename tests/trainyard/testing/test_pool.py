"""Ranks that stay: results, failures, and that no call disturbs the next."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainyard.errors import ConfigError
from trainyard.testing.pool import NotJoinedError, RankPool

pytestmark = pytest.mark.distributed


def total(start: float) -> tuple[float, int]:
    value = torch.full((), start + dist.get_rank())
    dist.all_reduce(value)
    return value.item(), os.getpid()


def test_the_same_processes_serve_calls_of_any_size(ranks: RankPool) -> None:
    four = ranks.run(total, 4, 10.0)
    assert [value for value, _ in four] == [46.0] * 4
    two = ranks.run(total, 2, 1.0)
    assert [value for value, _ in two] == [3.0] * 2
    assert [pid for _, pid in two] == [pid for _, pid in four[:2]]
    assert ranks.run(total, 1, 7.0)[0][0] == 7.0


def refuse() -> None:
    if dist.get_rank() == 1:
        raise ConfigError("--this is wrong")
    dist.barrier()


def die() -> None:
    if dist.get_rank() == 2:
        os._exit(9)
    dist.barrier()


def test_the_first_error_is_raised_and_the_next_call_works(ranks: RankPool) -> None:
    with pytest.raises(ConfigError, match="--this is wrong") as caught:
        ranks.run(refuse, 2)
    assert "raised on rank 1" in caught.value.__notes__[0]
    assert ranks.run(total, 2, 0.0)[1][0] == 1.0


def test_a_rank_that_dies_is_reported_and_replaced(ranks: RankPool) -> None:
    with pytest.raises(RuntimeError, match="rank 2 ended with exit code 9"):
        ranks.run(die, 3)
    assert [value for value, _ in ranks.run(total, 3, 0.0)] == [3.0] * 3


def sleep_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


@pytest.mark.slow
def test_a_rank_that_does_not_end_is_named_with_its_stacks(ranks: RankPool) -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1\] still ran after 1 s") as caught:
        ranks.run(sleep_on_one, 2, timeout_seconds=1.0)
    (note,) = caught.value.__notes__
    assert note.startswith("rank 1, ")
    assert "in sleep_on_one" in note
    assert ranks.run(total, 2, 0.0)[0][0] == 1.0


def draw() -> float:
    return torch.rand(()).item()


def test_generators_are_seeded_again_for_each_call(ranks: RankPool) -> None:
    assert ranks.run(draw, 2) == ranks.run(draw, 2)


@pytest.mark.parametrize("misses", [1, 2])
def test_a_call_whose_ranks_did_not_join_is_repeated_once(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch, misses: int
) -> None:
    run, calls = ranks._run, []

    def sometimes(*given: Any) -> list[Any]:
        calls.append(given)
        if len(calls) <= misses:
            raise NotJoinedError("connection closed by peer")
        return run(*given)

    monkeypatch.setattr(ranks, "_run", sometimes)
    if misses == 1:
        assert [value for value, _ in ranks.run(total, 2, 1.0)] == [3.0] * 2
    else:
        with pytest.raises(NotJoinedError):
            ranks.run(total, 2, 1.0)
    assert len(calls) == 2
