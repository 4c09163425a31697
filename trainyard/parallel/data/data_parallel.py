"""Data parallelism: the same weights on every rank, their gradients summed in flat buckets.

A gradient is added to its place in a bucket (buffers.py) as soon as backward has computed it. In
the last micro-batch a complete bucket is summed over the ranks, overlapping with backward if asked.
With the distributed optimizer each rank receives only the sum of its piece; with several instances
of it, that of its instance first, then over the ranks that have the same piece in others. Sums, not
means: the caller scales the losses.

The order of buckets and of their content follows the model alone, and collectives start in that
order on every rank, so two runs give the same bits. Over two ranks the size of buckets and the kind
of collective change no bit either, since a + b = b + a. Over more ranks the communication library
chooses the order of summation by the place in the bucket: equal buckets give equal bits, and with
gloo the kind of collective does not matter."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainyard.parallel.comm_errors import communicating
from trainyard.parallel.data.accumulate import put_gradient
from trainyard.parallel.data.buckets import shard_multiple
from trainyard.parallel.data.buffers import Bucket, BufferSlot, Member, build_buckets
from trainyard.parallel.data.fp8_codec import Fp8Codec, Fp8Weights
from trainyard.parallel.data.param_gather import ParameterGather
from trainyard.parallel.data_config import DataParallelConfig
from trainyard.parallel.model import group_size
from trainyard.parallel.shard_groups import ShardGroups

FULL_PRECISION = (torch.float32, torch.float64)
"""Dtypes of parameters that are updated in place, without a main copy."""

# torch 2.13 renamed it, and warns of the old name at every call; 2.11 has the old one only.
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def all_reduce_sum(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum over the group, in place; alone, the values themselves."""
    if group is not None:
        with communicating():
            dist.all_reduce(values, group=group)
    return values


class DataParallel:
    """The parameters of one model (or of one chunk of it) and their gradients over the ranks.

    In a step: `zero`, then all backward passes, `sync_on_next_backward` before the last of them,
    then `finish`. One rank alone in full precision has no buckets: gradients stay where backward
    leaves them, and nothing is copied."""

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        group: ProcessGroup | None,
        config: DataParallelConfig | None = None,
        *,
        shards: ShardGroups | None = None,
        grad_dtype: torch.dtype | None = None,
        alone: Collection[str] = (),
        fp8: Fp8Weights | None = None,
        of_experts: bool = False,
        always_flat: bool = False,
    ) -> None:
        """named: parameters in the order of the model; those that are frozen are left out.
        shards: how the group shards; unset: as one instance. grad_dtype: in which gradients are
        added up; unset: the parameters' own.

        alone: names of parameters that have a bucket each, so that they are cut alike on a stage
        that holds other parameters besides (the tied word embedding). fp8: weights that the
        distributed optimizer sends in 8 bits; unset: none. of_experts: the parameters
        are those of routed experts, and `group` is theirs. always_flat: one rank alone in full
        precision has buckets, too."""
        config = config or DataParallelConfig()
        self.members = [Member(name, p) for name, p in named if p.requires_grad]
        self.group, self.of_experts = group, of_experts
        self._shards = shards or ShardGroups(group, group)
        self.shard_group = self._shards.shard if config.sharding == "optim" else None
        self.is_sharded = self.shard_group is not None
        self._overlap = config.overlap_grad_reduce and group is not None
        is_alone = group is None and not always_flat
        whole = is_alone and all(m.parameter.dtype in FULL_PRECISION for m in self.members)
        sent_in_8_bits = () if fp8 is None or not self.is_sharded else fp8.names
        self.buckets = [] if whole else self._build(config, grad_dtype, alone, sent_in_8_bits)
        copies = self._shards.copies
        self._sums = [_BucketSum(b, group, self.shard_group, copies) for b in self.buckets]
        self.gather: ParameterGather | None = None
        if self.shard_group is not None:
            codec = None if fp8 is None else Fp8Codec(fp8.scaling, self.shard_group)
            overlap = config.overlap_param_gather
            self.gather = ParameterGather(self.buckets, self.shard_group, overlap, codec)
        self._armed = False
        self._num_started = 0
        self._grads: dict[Tensor, Tensor] = {}
        self._homes: dict[Tensor, tuple[_BucketSum, BufferSlot]] = {}
        for total in self._sums:
            for place in total.bucket.places:
                self._install(total, place)

    def _build(
        self,
        config: DataParallelConfig,
        grad_dtype: torch.dtype | None,
        alone: Collection[str],
        sent_in_8_bits: Collection[str],
    ) -> list[Bucket]:
        num_ranks = group_size(self.group)
        num_shards = self._shards.num_shards if self.is_sharded else 1
        high_bus = config.ddp_pad_buckets_for_high_nccl_busbw
        return build_buckets(
            self.members,
            grad_dtype=grad_dtype,
            bucket_size=config.bucket_size(
                sum(m.parameter.numel() for m in self.members), num_ranks
            ),
            # The same with and without the distributed optimizer: then sums are in one order, too.
            multiple=shard_multiple(num_ranks, high_bus=high_bus),
            num_shards=num_shards,
            shard=self._shards.shard_rank if self.is_sharded else 0,
            alone=alone,
            sent_in_8_bits=sent_in_8_bits,
        )

    def _install(self, total: _BucketSum, place: BufferSlot) -> None:
        """Make backward pass on each gradient as soon as it is computed."""
        parameter = place.member.parameter
        self._grads[parameter] = total.bucket.grad_view(place)
        self._homes[parameter] = total, place
        # Python's collector does not see the hooks of a parameter: what they hold would live for
        # ever, the buckets' memory and the group's threads with it.
        ours = weakref.ref(self)

        def hand_over(parameter: Tensor) -> None:
            if (alive := ours()) is not None:
                alive._hand_over(parameter)

        parameter.register_post_accumulate_grad_hook(hand_over)

    def _hand_over(self, parameter: Tensor) -> None:
        """Backward has the gradient of a parameter."""
        total, place = self._homes[parameter]
        assert parameter.grad is not None
        assert self.gather is None or self.gather.has(total.bucket), (
            f"{place.member.name} was used before it was fetched: none of the modules that "
            "ParameterGather.install was given was called for it"
        )
        total.add(place, self._grads[parameter], parameter.grad)
        parameter.grad = None
        if self._armed:
            total.num_missing -= 1
            if self._overlap and total.num_missing == 0:
                self._start_complete()

    # --- a step -------------------------------------------------------------------------------

    def zero(self) -> None:
        """Forget the gradients of the last step."""
        self._armed = False
        self._num_started = 0
        for total in self._sums:
            total.reset()
        if not self.buckets:  # backward may keep what it computed instead of copying it
            for member in self.members:
                member.parameter.grad = None

    def sync_on_next_backward(self) -> None:
        """The backward pass that comes next is the step's last through these parameters."""
        self._armed = True

    def finish(self) -> None:
        """Wait for all sums, including those that backward did not start. Then all ranks hold the
        same bits, or with the distributed optimizer the sums of their pieces."""
        with communicating():
            for total in self._sums[self._num_started :]:
                total.start()
            self._num_started = len(self._sums)
            for total in self._sums:
                total.wait()
            for total in self._sums:
                total.sum_copies()
            for total in self._sums:
                total.wait()

    def _start_complete(self) -> None:
        """Start the sums of complete buckets in bucket order: all ranks must start them in the same
        order, although their backward passes may finish them in others."""
        with communicating():
            while self._num_started < len(self._sums):
                total = self._sums[self._num_started]
                if total.num_missing > 0:
                    return
                total.start()
                self._num_started += 1

    # --- what others read ---------------------------------------------------------------------

    def grad_of(self, parameter: nn.Parameter) -> Tensor:
        """The gradient of a parameter, in its shape; zeros if the last step did not reach it.

        With the distributed optimizer, `finish` sums only the numbers of this rank's piece."""
        if self.buckets:
            return self._grads[parameter]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad


class _BucketSum:
    """The gradients of one bucket, first over micro-batches, then over ranks."""

    def __init__(
        self,
        bucket: Bucket,
        group: ProcessGroup | None,
        shard_group: ProcessGroup | None,
        copies: ProcessGroup | None,
    ) -> None:
        """group: sums all; shard_group: shards instead, and `copies` sums what its ranks have."""
        self.bucket = bucket
        self._group, self._shard_group, self._copies = group, shard_group, copies
        self._work: Any = None
        self._untouched: set[BufferSlot] = set()
        self.num_missing = 0
        self.reset()

    def reset(self) -> None:
        """Start over. The memory is not zeroed: the first gradient overwrites it, which saves
        writing and reading zeros."""
        assert self._work is None, "gradients were not waited for"
        self._untouched = set(self.bucket.places)
        self.num_missing = len(self.bucket.places)

    def add(self, place: BufferSlot, total: Tensor, grad: Tensor) -> None:
        """Add the gradient of one backward pass; the sum may have another dtype."""
        is_first = place in self._untouched
        self._untouched.discard(place)
        put_gradient(total, grad, is_first=is_first)

    @torch.no_grad()
    def start(self) -> None:
        """Begin the sum over ranks."""
        for place in self._untouched:
            self.bucket.grad_view(place).zero_()
        self._untouched.clear()
        if self._group is None:
            return
        bucket = self.bucket
        if self._shard_group is not None:
            self._work = _reduce_scatter(
                bucket.own_grads, bucket.grads, group=self._shard_group, async_op=True
            )
        else:
            self._work = dist.all_reduce(bucket.grads, group=self._group, async_op=True)

    def sum_copies(self) -> None:
        """Begin the sum over the ranks that have the same piece in other instances."""
        if self._shard_group is not None and self._copies is not None:
            own = self.bucket.own_grads
            self._work = dist.all_reduce(own, group=self._copies, async_op=True)

    def wait(self) -> None:
        """Wait for the sum; on CUDA the current stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
            self._work = None
