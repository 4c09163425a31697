"""Data parallelism: the same weights everywhere, gradients averaged in flat buckets.

The gradient of each parameter is a view into a bucket, so that one collective serves many
parameters. The order of buckets and of what they hold follows the model alone: two runs average
alike, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainyard.errors import InfrastructureError

BUCKET_SIZE = 40_000_000
"""Numbers in a bucket: enough to fill the network, few enough to overlap one with the next."""

ALIGNMENT = 32
"""Numbers that each gradient begins at a multiple of: 128 bytes of fp32, for vector units and
NCCL."""


class GradientBuckets:
    """The gradients of a model; `zero` before a step, `reduce` after its last backward pass."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: ProcessGroup | None,
        bucket_size: int = BUCKET_SIZE,
    ) -> None:
        self._parameters = list(parameters)
        self._group = group
        self._buckets: list[Tensor] = []
        if group is not None:
            for members in partition(self._parameters, bucket_size):
                self._buckets.append(_flat_gradients(members))

    def zero(self) -> None:
        """Forget the gradients of the last step."""
        for bucket in self._buckets:
            bucket.zero_()
        if self._group is None:  # alone, backward may keep what it computed instead of copying it
            for parameter in self._parameters:
                parameter.grad = None

    def reduce(self, average: bool = True) -> None:
        """Average (or add up) the gradients over the group; afterwards all ranks hold the same
        bits."""
        if self._group is None:
            return
        world_size = dist.get_world_size(self._group)
        with reported():
            works = [
                dist.all_reduce(bucket, group=self._group, async_op=True)
                for bucket in self._buckets
            ]
            for work in works:
                assert work is not None
                work.wait()
        if average:
            torch._foreach_div_(self._buckets, float(world_size))


class reported:  # noqa: N801  # reads as a phrase: `with reported():`
    """A collective that fails means a rank or the network is gone: InfrastructureError."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise InfrastructureError(f"communication between ranks failed: {error}") from error


def all_reduce_sum(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum over the group, in place; alone, the values themselves."""
    if group is not None:
        with reported():
            dist.all_reduce(values, group=group)
    return values


def partition(parameters: Sequence[nn.Parameter], bucket_size: int) -> list[list[nn.Parameter]]:
    """Consecutive parameters in buckets of at most `bucket_size` numbers, larger ones alone.

    From the last to the first: the order in which backward finishes them."""
    buckets: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in reversed(parameters):
        fits = buckets and filled + parameter.numel() <= bucket_size
        same = buckets and parameter.dtype == buckets[-1][0].dtype
        if not (fits and same):
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter)
        filled += parameter.numel()
    return buckets


def _flat_gradients(members: list[nn.Parameter]) -> Tensor:
    """One flat tensor that holds the gradients of all members."""
    sizes = [-(-member.numel() // ALIGNMENT) * ALIGNMENT for member in members]
    flat = torch.zeros(sum(sizes), dtype=members[0].dtype, device=members[0].device)
    for member, piece in zip(members, torch.split(flat, sizes), strict=True):
        member.grad = piece[: member.numel()].view_as(member)
    return flat
