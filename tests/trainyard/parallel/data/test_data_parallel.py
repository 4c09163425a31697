"""Sums of gradients over real processes: the same whatever the buckets and the overlap."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainyard.parallel.data.data_parallel import DataParallel
from trainyard.parallel.data.param_gather import all_gather_single
from trainyard.parallel.data_config import DataParallelConfig
from trainyard.testing.pool import RankPool

INPUTS = torch.arange(24, dtype=torch.float32).view(4, 6) / 10


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3), nn.Linear(3, 70)).to(dtype)


def backward(model: nn.Module, inputs: Tensor) -> None:
    model(inputs.to(next(model.parameters()).dtype)).square().sum().backward()


def summed(config: DataParallelConfig, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The gradients of two steps' last, of two micro-batches a rank."""
    model = small_model(dtype)
    group = dist.group.WORLD if dist.is_initialized() else None
    parallel = DataParallel(model.named_parameters(), group, config, grad_dtype=torch.float32)
    if parallel.gather is not None:
        parallel.gather.install(model)
    size, rank = (dist.get_world_size(), dist.get_rank()) if group else (1, 0)
    for _ in range(2):  # the second step must not see the first
        parallel.zero()
        own = INPUTS.chunk(size)[rank].chunk(2)
        for number, part in enumerate(own):
            if number == len(own) - 1:
                parallel.sync_on_next_backward()
            backward(model, part)
        parallel.finish()
        for bucket in parallel.buckets if parallel.is_sharded else []:
            all_gather_single(bucket.grads, bucket.own_grads, group=group)
    return [parallel.grad_of(p).clone() for p in model.parameters()]


@pytest.mark.few_cases(2)
@pytest.mark.distributed
@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_sums_over_ranks_equal_one_process_whatever_the_buckets(
    ranks: RankPool, is_sharded: bool, overlap: bool
) -> None:
    model = small_model()
    backward(model, INPUTS)
    expected = [p.grad for p in model.parameters()]
    plain = ranks.run(summed, 2, DataParallelConfig())
    for size in (10, 10_000):
        config = DataParallelConfig(
            use_distributed_optimizer=is_sharded,
            overlap_grad_reduce=overlap,
            ddp_bucket_size=size,
        )
        for of_rank in ranks.run(summed, 2, config):
            for grad, other, reference in zip(of_rank, plain[0], expected, strict=True):
                assert torch.equal(grad, other), "buckets or collectives changed the result"
                torch.testing.assert_close(grad, reference)


@pytest.mark.parametrize("num_backwards", [1, 3])
def test_16_bit_gradients_are_added_up_in_fp32_and_freed(num_backwards: int) -> None:
    model = small_model(torch.bfloat16)
    parallel = DataParallel(model.named_parameters(), None, grad_dtype=torch.float32)
    reference = small_model(torch.bfloat16)
    expected = [torch.zeros_like(p, dtype=torch.float32) for p in reference.parameters()]
    for step in range(2):
        parallel.zero()
        for number in range(num_backwards):
            backward(model, INPUTS + number)
            assert all(p.grad is None for p in model.parameters())
            if step == 0:
                backward(reference, INPUTS + number)
                for total, p in zip(expected, reference.parameters(), strict=True):
                    assert p.grad is not None
                    total += p.grad
                    p.grad = None
        parallel.finish()
    for p, total in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parallel.grad_of(p), total)


def test_alone_in_fp32_gradients_stay_where_backward_left_them() -> None:
    model = small_model()
    parallel = DataParallel(model.named_parameters(), None)
    assert not parallel.buckets
    backward(model, INPUTS)
    parallel.finish()
    assert all(parallel.grad_of(p) is p.grad for p in model.parameters())
    parallel.zero()
    assert all(p.grad is None for p in model.parameters())


def test_nothing_lives_on_in_the_hooks_of_parameters() -> None:
    model = small_model(torch.bfloat16)
    data = DataParallel(model.named_parameters(), None, grad_dtype=torch.float32)
    data.zero()
    backward(model, INPUTS)
    held = [weakref.ref(data), weakref.ref(data.buckets[0]), weakref.ref(data.buckets[0].grads)]
    del data
    gc.collect()
    assert [reference() for reference in held] == [None, None, None]
    backward(model, INPUTS)  # as if it had never been there
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_backward_does_not_reach_has_no_gradient_of_the_step_before() -> None:
    model = small_model(torch.bfloat16)
    parallel = DataParallel(model.named_parameters(), None, grad_dtype=torch.float32)
    backward(model, INPUTS)
    parallel.finish()
    parallel.zero()
    model[0](INPUTS.bfloat16()).sum().backward()  # type: ignore[index]
    parallel.finish()
    reached, other = (next(model[i].parameters()) for i in (0, 2))  # type: ignore[index]
    assert parallel.grad_of(reached).any()
    assert not parallel.grad_of(other).any()


def frozen_first() -> bool:
    """A rank whose second layer backward does not reach starts the same sums as the others."""
    model = small_model()
    config = DataParallelConfig(overlap_grad_reduce=True, ddp_bucket_size=1)
    parallel = DataParallel(model.named_parameters(), dist.group.WORLD, config)
    parallel.zero()
    parallel.sync_on_next_backward()
    if dist.get_rank() == 0:
        backward(model, INPUTS)
    else:
        model[0](INPUTS).square().sum().backward()  # type: ignore[index]
    parallel.finish()
    grads = [parallel.grad_of(p).clone() for p in model.parameters()]
    for grad in grads:
        other = grad.clone()
        dist.broadcast(other, 0)
        assert torch.equal(grad, other)
    return True


@pytest.mark.distributed
def test_ranks_that_reach_other_parameters_still_agree(ranks: RankPool) -> None:
    assert ranks.run(frozen_first, 2) == [True, True]
