"""Asynchronous collectives, in eager mode and under `torch.compile`.

These are torch's functional collectives: they return a tensor at once, whose contents are valid
after `finish`. On CUDA that makes the current stream wait, not the host. A group that is None is
one rank alone: nothing is sent, and what comes back may be the argument itself.

s sequence."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from trainyard.parallel.model import group_size

Operation = Literal["sum", "max"]

# The same functions as torch.distributed's, behind one door: these alone can be traced and be
# asynchronous. Typed by hand, as torch.ops is filled when torch is loaded.
_FUNCTIONAL: Any = torch.ops._c10d_functional


def group_called(name: str) -> ProcessGroup:
    """The group of this name: custom operators take names, as they have no type for a group."""
    lookup: Any = distributed_c10d
    group: ProcessGroup = lookup._resolve_process_group(name)
    return group


def finish(begun: Tensor) -> Tensor:
    """What a `start_...` returned, now safe to read."""
    done: Tensor = _FUNCTIONAL.wait_tensor(begun)
    return done


def start_all_reduce(x: Tensor, group: ProcessGroup | None, op: Operation = "sum") -> Tensor:
    """Begin to add `x` up over the group; `x` is left as it is."""
    if group is None:
        return x
    begun: Tensor = _FUNCTIONAL.all_reduce(x.contiguous(), op, group.group_name)
    return begun


def start_all_reduce_of_own(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Begin to add `x` up over the group, in the memory of `x`, which must be the caller's own."""
    if group is None:
        return x
    if torch.compiler.is_compiling():  # there the compiler finds out by itself what may be reused
        return start_all_reduce(x, group)
    begun: Tensor = _FUNCTIONAL.all_reduce_(x.contiguous(), "sum", group.group_name)
    return begun


def start_all_gather(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Begin to put all ranks' `x` after one another along the first dim."""
    if group is None:
        return x
    begun: Tensor = _FUNCTIONAL.all_gather_into_tensor(
        x.contiguous(), group_size(group), group.group_name
    )
    return begun


def start_reduce_scatter(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Begin to add `x` up over the group and keep this rank's part of the first dim."""
    if group is None:
        return x
    assert x.shape[0] % group_size(group) == 0, (tuple(x.shape), group_size(group))
    begun: Tensor = _FUNCTIONAL.reduce_scatter_tensor(
        x.contiguous(), "sum", group_size(group), group.group_name
    )
    return begun


def start_all_to_all(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Begin to give part i of the first dim to rank i and take part `group_rank` of each."""
    if group is None:
        return x
    size = group_size(group)
    assert x.shape[0] % size == 0, (tuple(x.shape), size)
    split = [x.shape[0] // size] * size
    begun: Tensor = _FUNCTIONAL.all_to_all_single(x.contiguous(), split, split, group.group_name)
    return begun


def all_reduce(x: Tensor, group: ProcessGroup | None, op: Operation = "sum") -> Tensor:
    """`x` added up over the group (or its maximum); `x` is left as it is."""
    return x if group is None else finish(start_all_reduce(x, group, op))


def all_gather(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """All ranks' `x` after one another along the first dim."""
    return x if group is None else finish(start_all_gather(x, group))


def reduce_scatter(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """This rank's part, along the first dim, of the sum of `x` over the group."""
    return x if group is None else finish(start_reduce_scatter(x, group))


def all_to_all_first(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Part i of the first dim goes to rank i; part `group_rank` of every rank comes back."""
    return x if group is None else finish(start_all_to_all(x, group))
