"""A step does not depend on how its batch is cut, and its loss is Megatron-LM's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.trainyard.training.small_gpt import (
    TRAINING,
    Counting,
    build_train_module,
    model_of,
    moments_of,
    rates,
    size_of,
)
from trainyard.datasets.loader import Batch, collate
from trainyard.errors import DataError
from trainyard.parallel.dims import ParallelDims
from trainyard.parallel.groups import ALONE, ProcessGroups, build_groups
from trainyard.testing.pool import RankPool
from trainyard.testing.tolerances import FP32_SUM_ORDER
from trainyard.training.loop.seeds import digest_of_every_seed, microbatch_seed, step_digest
from trainyard.training.loop.step import StepResult, TrainModule
from trainyard.training.options.training import TrainingConfig


def batches_of(indices: list[int], micro_batch_size: int) -> Iterator[Batch]:
    data = Counting()
    for first in range(0, len(indices), micro_batch_size):
        yield collate([data[i] for i in indices[first : first + micro_batch_size]])


def one_step(
    training: TrainingConfig, dropout: float = 0.0, groups: ProcessGroups = ALONE
) -> tuple[StepResult, dict[str, torch.Tensor]]:
    train_module = build_train_module(training, dropout, groups)
    dp, rank, size = (
        train_module.groups.dims.dp,
        train_module.groups.rank,
        training.micro_batch_size,
    )
    place = range(rank * size, 8, size * dp)
    own = list(itertools.chain(*([*range(first, first + size)] for first in place)))
    whole = size_of(training, train_module.groups)
    result = train_module.step(1, whole, batches_of(own, size), rates(0.01, 0.1))
    # A tenth of the gradient, clipped; the parameters themselves amplify what is next to zero.
    return result, moments_of(train_module)


def test_per_token_loss_does_not_depend_on_micro_batches() -> None:
    whole = replace(TRAINING, micro_batch_size=8, calculate_per_token_loss=True)
    expected, moments = one_step(whole)
    result, accumulated = one_step(replace(whole, micro_batch_size=2))
    assert result.lm_loss == pytest.approx(expected.lm_loss, rel=1e-6)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    torch.testing.assert_close(accumulated, moments, **FP32_SUM_ORDER)


def test_the_gradient_is_the_mean_over_micro_batches_of_their_means() -> None:
    training = replace(TRAINING, micro_batch_size=4)
    train_module, losses = build_train_module(training), []
    model = model_of(build_train_module(training))
    for batch in batches_of(list(range(8)), 4):
        loss = model.loss(batch["tokens"], batch["labels"])
        losses.append((loss * batch["loss_mask"]).sum() / batch["loss_mask"].sum())
    (sum(losses) / 2).backward()  # type: ignore[union-attr]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    expected = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]))
    batches = batches_of(list(range(8)), 4)
    result = train_module.step(1, size_of(training), batches, rates(0.0, 0.0))
    assert result.grad_norm == pytest.approx(float(expected), rel=1e-5)


def on_two_ranks(
    training: TrainingConfig, dropout: float
) -> tuple[StepResult, dict[str, torch.Tensor]]:
    groups = build_groups(ParallelDims(dp=2), dist.get_rank())
    return one_step(training, dropout, groups)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("per_token", [False, True])
def test_two_ranks_make_the_same_step_as_one_with_dropout(ranks: RankPool, per_token: bool) -> None:
    training = replace(TRAINING, calculate_per_token_loss=per_token)
    expected, moments = one_step(training, dropout=0.2)
    (first, a), (second, b) = ranks.run(on_two_ranks, 2, training, 0.2)
    assert first == second, "ranks disagree on loss or norm"
    assert first.lm_loss == pytest.approx(expected.lm_loss, rel=1e-6)
    assert first.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    torch.testing.assert_close(a, b, rtol=0, atol=0, msg="ranks hold different moments")
    torch.testing.assert_close(a, moments, **FP32_SUM_ORDER)


def loss_of(train_module: TrainModule, batches: Iterator[Batch], count: int) -> float:
    measured = train_module.evaluate(batches, count)
    assert measured is not None
    return measured.loss


def test_evaluation_draws_nothing_and_changes_nothing() -> None:
    train_module = build_train_module(dropout=0.5)
    before = torch.get_rng_state()
    losses = {loss_of(train_module, batches_of(list(range(8)), 2), 4) for _ in range(2)}
    assert len(losses) == 1
    assert torch.equal(torch.get_rng_state(), before)
    larger = loss_of(train_module, batches_of(list(range(8)), 8), 1)
    assert larger == pytest.approx(losses.pop(), rel=1e-6)


def test_dropout_depends_only_on_seed_step_and_micro_batch() -> None:
    seeds = {microbatch_seed(1, step, place) for step in range(50) for place in range(50)}
    assert len(seeds) == 2500
    assert microbatch_seed(1, 2, 3) == microbatch_seed(1, 2, 3) != microbatch_seed(2, 2, 3)


def test_the_digest_of_seeds_tells_runs_steps_and_numbers_of_micro_batches_apart() -> None:
    sizes = [(seed, step, n) for seed in range(8) for step in range(8) for n in range(1, 9)]
    assert len({step_digest(*size) for size in sizes}) == len(sizes)
    assert step_digest(1234, 40, 4) == "b8393c1105658af1"
    assert digest_of_every_seed(1234, 40, 4) == "7ee1b864ee3ff104", "of an earlier version"


def test_divergence_is_reported_before_the_update() -> None:
    train_module = build_train_module()
    with torch.no_grad():
        next(train_module.chunks[0].parameters())[3] = float("inf")
    with pytest.raises(DataError, match=r"step 7: loss nan.*lower --lr"):
        train_module.step(7, size_of(TRAINING), batches_of(list(range(8)), 2), rates(0.01, 0.1))
    assert train_module.optimizer.num_updates == 0
