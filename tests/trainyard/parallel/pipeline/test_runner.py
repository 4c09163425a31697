"""Micro-batches through a pipeline on gloo, against one process."""

from __future__ import annotations

import time
from datetime import timedelta
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.trainyard.parallel.pipeline.stacks import (
    SHAPE,
    Batch,
    Stack,
    batches,
    even,
    forward_step,
    gradients,
    whole,
)
from trainyard.errors import DataError, InfrastructureError
from trainyard.parallel.dims import ParallelDims
from trainyard.parallel.groups import build_groups
from trainyard.parallel.pipeline.p2p import HiddenSpec, PipelineLinks, connect
from trainyard.parallel.pipeline.partition import Partition, arrange
from trainyard.parallel.pipeline.runner import PipelineRunner
from trainyard.testing.distributed import run_distributed
from trainyard.testing.pool import RankPool
from trainyard.testing.tolerances import FP32_SUM_ORDER

Result = tuple[list[Tensor], dict[str, Tensor], list[Tensor]]
"""Losses of training, gradients, losses of evaluation."""


def serial(split: Partition, count: int, order: list[int] | None = None) -> Result:
    """The whole model in this process."""
    module = whole(split)
    runner = PipelineRunner([module], forward_step())
    losses = runner.train(batches(count, order), count)
    return losses, gradients([module]), runner.evaluate(batches(count, order), count)


def links_of(split: Partition, device: str = "cpu") -> PipelineLinks:
    """To the other ranks of this rank's pipeline: all ranks, or one of several pipelines."""
    pp, world = len(split), dist.get_world_size()
    groups = build_groups(ParallelDims(pp=pp, dp=world // pp), dist.get_rank())
    links = connect(groups, HiddenSpec(SHAPE, torch.float32, torch.device(device)), len(split[0]))
    assert links is not None
    return links


def piped(
    split: Partition, counts: list[int], group_size: int | None, order: list[int] | None
) -> list[Result]:
    """The part of this rank, for several numbers of micro-batches one after another."""
    links = links_of(split)
    results = []
    for count in counts:
        modules = [Stack(stage) for stage in split[links.rank]]
        called: list[int] = []
        runner = PipelineRunner(
            modules,
            forward_step(),
            links,
            group_size=group_size,
            before_last_backward=called.append,
        )
        losses = runner.train(batches(count, order), count)
        assert sorted(called) == list(range(len(modules)))
        results.append((losses, gradients(modules), runner.evaluate(batches(count, order), count)))
    return results


def check_equal(
    ranks: RankPool,
    split: Partition,
    counts: list[int],
    group_size: int | None = None,
    order: list[int] | None = None,
) -> None:
    """Losses, gradients and evaluation of a pipeline are those of one process, bit for bit."""
    told = ranks.run(piped, len(split), split, counts, group_size, order)
    for index, count in enumerate(counts):
        losses, expected, evaluated = serial(split, count, order)
        *others, last = [rank[index] for rank in told]
        assert all(not rank[0] and not rank[2] for rank in others)
        assert torch.equal(torch.stack(last[0]), torch.stack(losses))
        assert torch.equal(torch.stack(last[2]), torch.stack(evaluated))
        found = {name: grad for rank in [*others, last] for name, grad in rank[1].items()}
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.equal(found[name], gradient), name


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("pp", "chunks"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_a_pipeline_computes_what_one_process_computes(
    ranks: RankPool, pp: int, chunks: int
) -> None:
    check_equal(ranks, even(pp, chunks), [1, 2, 4, 7, 8])


@pytest.mark.distributed
@pytest.mark.parametrize("group_size", [3, 4, 8])
def test_any_group_size_gives_the_same_step(ranks: RankPool, group_size: int) -> None:
    check_equal(ranks, even(2, 3), [8], group_size)


def fewer_samples() -> list[Batch]:
    return [(x[:, :1], y[:, :1]) for x, y in batches(1)]


def measured_in_turn(split: Partition) -> list[list[Tensor]]:
    """Whole micro-batches, one with fewer samples, and whole ones again."""
    links = links_of(split)
    runner = PipelineRunner([Stack(s) for s in split[links.rank]], forward_step(), links)
    share = Fraction(1, SHAPE[1])
    return [
        runner.evaluate(batches(3), 3),
        runner.evaluate(fewer_samples(), 1, share),
        runner.evaluate(batches(3), 3),
    ]


@pytest.mark.distributed
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_microbatch_may_have_fewer_samples_in_a_measurement(ranks: RankPool, chunks: int) -> None:
    split = even(2, chunks)
    runner = PipelineRunner([whole(split)], forward_step())
    expected = [runner.evaluate(some, len(some)) for some in (batches(3), fewer_samples())]
    found = ranks.run(measured_in_turn, 2, split)[-1]
    for mine, theirs in zip(found, [*expected, expected[0]], strict=True):
        assert torch.equal(torch.stack(mine), torch.stack(theirs))


@pytest.mark.slow
@pytest.mark.distributed
def test_uneven_and_empty_stages_give_the_same_step(ranks: RankPool) -> None:
    check_equal(ranks, arrange([0, 3, 1, 0, 2, 0], 3), [3, 6])


@pytest.mark.slow
@pytest.mark.distributed
def test_the_order_of_microbatches_changes_no_loss_and_only_the_rounding_of_gradients(
    ranks: RankPool,
) -> None:
    split, order = even(2, 2), [3, 1, 0, 2]
    check_equal(ranks, split, [4], order=order)
    losses, expected, _ = serial(split, 4)
    permuted, found, _ = serial(split, 4, order)
    assert torch.equal(torch.stack(permuted), torch.stack([losses[i] for i in order]))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-7)


def two_pipelines(split: Partition) -> list[Result]:
    """Each pipeline has micro-batches of its own."""
    order = [0, 1, 2] if dist.get_rank() % 2 == 0 else [2, 1, 0]
    return piped(split, [3], None, order)


@pytest.mark.distributed
def test_pipelines_side_by_side_keep_to_themselves(ranks: RankPool) -> None:
    split = even(2, 2)
    told = ranks.run(two_pipelines, 4, split)
    for pipeline, order in enumerate([[0, 1, 2], [2, 1, 0]]):
        losses, expected, _ = serial(split, 3, order)
        (_, upper, _), (found, lower, _) = told[pipeline][0], told[pipeline + 2][0]
        assert torch.equal(torch.stack(found), torch.stack(losses))
        gradients_ = upper | lower
        assert all(torch.equal(gradients_[name], g) for name, g in expected.items())


def on_gpu(split: Partition, count: int) -> Result:
    """A pipeline over NCCL, several steps, so that channels are used again and again."""
    device = f"cuda:{dist.get_rank()}"
    torch.cuda.set_device(device)
    links = links_of(split, device)
    modules = [Stack(stage).to(device) for stage in split[links.rank]]
    runner = PipelineRunner(modules, forward_step(), links)
    data = [(x.to(device), y.to(device)) for x, y in batches(count)]
    for _ in range(3):
        for module in modules:
            module.zero_grad()
        losses = runner.train(data, count)
        evaluated = runner.evaluate(data, count)
    found = {name: gradient.cpu() for name, gradient in gradients(modules).items()}
    return [loss.cpu() for loss in losses], found, [loss.cpu() for loss in evaluated]


@pytest.mark.distributed
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_pipeline_over_nccl_computes_what_one_process_computes(chunks: int) -> None:
    pp = min(torch.cuda.device_count(), 4)
    split, count = even(pp, chunks), 2 * pp
    told = run_distributed(on_gpu, pp, "nccl", split, count)
    losses, expected, evaluated = serial(split, count)
    torch.testing.assert_close(told[-1][0], losses, **FP32_SUM_ORDER)
    torch.testing.assert_close(told[-1][2], evaluated, **FP32_SUM_ORDER)
    found = {name: gradient for rank in told for name, gradient in rank[1].items()}
    torch.testing.assert_close(found, expected, **FP32_SUM_ORDER)


def test_one_process_reads_no_batch_too_many_and_is_a_plain_loop() -> None:
    split = even(1, 1, layers_per_stage=2)
    module, iterator, called = whole(split), iter(batches(5)), list[int]()
    seen: list[tuple[int, int]] = []
    runner = PipelineRunner([module], forward_step(seen), before_last_backward=called.append)
    losses = runner.train(iterator, 4)
    assert seen == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert called == [0]
    assert len(list(iterator)) == 1
    assert not any(loss.requires_grad for loss in losses)
    plain = whole(split)
    for inputs, targets in batches(4):
        ((plain(inputs) - targets) ** 2).mean().backward()
    expected = gradients([plain])
    assert all(torch.equal(g, expected[name]) for name, g in gradients([module]).items())


# --- failures -----------------------------------------------------------------------------------


def fail_on_rank_1(split: Partition) -> None:
    links = links_of(split)
    healthy = forward_step()

    def step(
        chunk: int, module: nn.Module, hidden: Tensor | None, microbatch: int, batch: Batch
    ) -> Tensor:
        if links.rank == 1 and microbatch == 2:
            raise DataError("token 9 of document 4 is outside the vocabulary")
        return healthy(chunk, module, hidden, microbatch, batch)

    modules = [Stack(stage) for stage in split[links.rank]]
    PipelineRunner(modules, step, links).train(batches(4), 4)


@pytest.mark.distributed
def test_a_rank_that_fails_ends_all_and_its_error_is_raised(ranks: RankPool) -> None:
    began = time.monotonic()
    with pytest.raises(DataError, match="token 9 of document 4"):
        ranks.run(fail_on_rank_1, 3, even(3, 1))
    assert time.monotonic() - began < 30


def wait_in_vain(split: Partition) -> str:
    group = dist.new_group(timeout=timedelta(seconds=1))
    message = ""
    if dist.get_rank() == 0:
        modules = [Stack(stage) for stage in split[0]]
        links = PipelineLinks(group, HiddenSpec(SHAPE, torch.float32, torch.device("cpu")))
        with pytest.raises(InfrastructureError) as caught:
            PipelineRunner(modules, forward_step(), links).train(batches(2), 2)
        message = str(caught.value)
    dist.barrier()
    return message


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_that_is_silent_is_named_after_the_timeout(ranks: RankPool) -> None:
    message, _ = ranks.run(wait_in_vain, 2, even(2, 1))
    assert "pipeline rank" in message
    assert "micro-batch" in message
