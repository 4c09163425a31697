"""Process groups of a run, created once and passed to the code that communicates.

A group of one rank is None, so that the code path is that of one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from trainyard import errors
from trainyard.errors import CommunicationError, TrainyardError, lack_of_memory
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.dims import Coordinates, ExpertDims, ParallelDims, dims_of, expert_dims_of
from trainyard.parallel.gloo import wait_for_gloo
from trainyard.parallel.launcher import rank_of_environment
from trainyard.parallel.model import ExpertParallel, ModelParallel
from trainyard.parallel.rendezvous import join_ranks
from trainyard.parallel.shard_groups import (
    UNSHARDED,
    ShardGroups,
    copies_of,
    instances_of,
    shards_of,
)

__all__ = [
    "ALONE",
    "ProcessGroups",
    "broadcast_object",
    "gather_objects",
    "gather_or_raise",
    "process_groups",
    "rank_of_environment",
]


ONE_RANK = ExpertDims(stages=((0,),))


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """Coordinates and process groups of this rank."""

    dims: ParallelDims
    rank: int
    dp: ProcessGroup | None = None
    """Ranks that hold the same weights and see different samples."""
    tp: ProcessGroup | None = None
    """Ranks that share each matrix."""
    cp: ProcessGroup | None = None
    """Ranks that share each sequence."""
    pp: ProcessGroup | None = None
    """Ranks that share the layers, first stage first."""
    dp_cp: ProcessGroup | None = None
    """Ranks that hold the same weights: gradients are added up over them."""
    tp_cp: ProcessGroup | None = None
    """Ranks that share the tokens and matrices of a layer."""
    model: ProcessGroup | None = None
    """Ranks that hold one copy of all weights (tp x pp): norms are over them."""
    embedding: ProcessGroup | None = None
    """First and last pipeline rank, which hold one embedding twice if it is tied; None between."""
    stage: ProcessGroup | None = None
    """Ranks of one pipeline stage."""
    world: ProcessGroup | None = None
    """All ranks."""
    expert_dims: ExpertDims = ONE_RANK
    """The grid of routed experts."""
    experts: ProcessGroup | None = None
    """Ranks that hold one copy of the experts of a stage: they exchange tokens."""
    expert_tp: ProcessGroup | None = None
    """Ranks that share each matrix of an expert."""
    expert_dp: ProcessGroup | None = None
    """Ranks that hold the same experts: their gradients are added up over them."""
    expert_model: ProcessGroup | None = None
    """Ranks that hold one copy of all experts: norms of these are over them."""
    dp_cp_shards: ShardGroups = UNSHARDED
    """How `dp_cp` shards what it shards."""
    expert_dp_shards: ShardGroups = UNSHARDED
    """How `expert_dp` does."""

    @property
    def coordinates(self) -> Coordinates:
        """This rank's place on every axis."""
        return self.dims.coordinates(self.rank)

    @property
    def dp_rank(self) -> int:
        """Place in the data-parallel group."""
        return self.coordinates.dp

    @property
    def tp_rank(self) -> int:
        """Place in the tensor-parallel group."""
        return self.coordinates.tp

    @property
    def cp_rank(self) -> int:
        """Place in the context-parallel group."""
        return self.coordinates.cp

    @property
    def pp_rank(self) -> int:
        """Place in the pipeline."""
        return self.coordinates.pp

    @property
    def has_expert_grid(self) -> bool:
        """Whether experts are spread over ranks otherwise than the rest of a layer."""
        return self.expert_dims.ep > 1 or self.expert_dims.tp != self.dims.tp

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank ends the pipeline."""
        return self.pp_rank == self.dims.pp - 1

    def model_parallel(self, config: ParallelConfig) -> ModelParallel:
        """The groups that the modules of a model need."""
        return ModelParallel(
            tp=self.tp,
            cp=self.cp,
            sequence_parallel=config.sequence_parallel,
            cp_comm_type=config.cp_comm_type,
            tp_comm_overlap=config.tp_comm_overlap,
            tokens=self.tp_cp,
            same_time=self.stage,
            experts=self._expert_parallel(),
        )

    def _expert_parallel(self) -> ExpertParallel:
        dims = self.expert_dims
        own = dims.coordinates(self.rank)
        together = next(r for r in dims.group_ranks("tp", "ep") if self.rank in r)
        return ExpertParallel(
            group=self.experts,
            ep_size=dims.ep,
            ep_rank=own.ep,
            tp_size=dims.tp,
            tp_rank=own.tp,
            ep_of_rank=tuple(dims.coordinates(rank).ep for rank in together),
        )


ALONE = ProcessGroups(ParallelDims(), 0)
"""One process: a notebook, a test, a small run."""


def build_groups(
    dims: ParallelDims,
    rank: int,
    timeout: timedelta | None = None,
    expert_dims: ExpertDims | None = None,
    num_instances: int = 1,
) -> ProcessGroups:
    """The groups of all axes; a collective call that needs the default group. expert_dims: the grid
    of routed experts; unset: they are cut as the rest of a layer. num_instances: groups of
    data-parallel ranks, each of which shards all that they shard."""
    if dims.world_size == 1:
        return ProcessGroups(dims, rank)
    maker = _Maker(rank, dims.world_size, timeout)
    experts = expert_dims or ExpertDims(
        stages=tuple(map(tuple, sorted(dims.group_ranks("tp", "cp", "dp")))), tp=dims.tp
    )
    pipelines = dims.group_ranks("pp")
    dp_cp, expert_dp = dims.group_ranks("dp", "cp"), experts.group_ranks("dp")
    return ProcessGroups(
        dims,
        rank,
        dp=maker.make(dims.group_ranks("dp"), "dp"),
        tp=maker.make(dims.group_ranks("tp"), "tp"),
        cp=maker.make(dims.group_ranks("cp"), "cp"),
        pp=maker.make(pipelines, "pp"),
        dp_cp=maker.make(dp_cp, "dp_cp"),
        tp_cp=maker.make(dims.group_ranks("tp", "cp"), "tp_cp"),
        model=maker.make(dims.group_ranks("tp", "pp"), "model"),
        embedding=maker.make([_ends(ranks) for ranks in pipelines], "embedding"),
        stage=maker.make(dims.group_ranks("tp", "cp", "dp"), "stage"),
        world=dist.group.WORLD,
        expert_dims=experts,
        experts=maker.make(experts.group_ranks("tp", "ep"), "experts"),
        expert_tp=maker.make(experts.group_ranks("tp"), "expert_tp"),
        expert_dp=maker.make(expert_dp, "expert_dp"),
        expert_model=maker.make(experts.group_ranks("tp", "ep", "pp"), "expert_model"),
        dp_cp_shards=maker.shard_groups(dp_cp, num_instances, "dp_cp"),
        expert_dp_shards=maker.shard_groups(expert_dp, num_instances, "expert_dp"),
    )


def host_group(groups: ProcessGroups, timeout: timedelta | None = None) -> ProcessGroup | None:
    """A separate gloo group of all ranks, for a thread beside training; a collective call. None for
    one rank alone."""
    if groups.world is None:
        return None
    made: ProcessGroup = dist.new_group(backend="gloo", timeout=timeout, group_desc="host")
    return made


def _ends(pipeline: list[int]) -> list[int]:
    return [pipeline[0], pipeline[-1]] if len(pipeline) > 1 else pipeline


class _Maker:
    """Creates each set of groups once, under any name: with cp = 1, dp_cp is dp."""

    def __init__(self, rank: int, world_size: int, timeout: timedelta | None) -> None:
        self._rank, self._timeout = rank, timeout
        everyone = tuple(range(world_size))
        self._made: dict[tuple[int, ...], ProcessGroup | None] = {everyone: dist.group.WORLD}

    def make(self, groups: list[list[int]], name: str) -> ProcessGroup | None:
        """The group of these that holds this rank. Every rank makes all of them, in this order:
        the backends count calls."""
        mine: ProcessGroup | None = None
        for ranks in groups:
            group = self._one(tuple(ranks), name) if len(ranks) > 1 else None
            if self._rank in ranks:
                mine = group
        return mine

    def shard_groups(self, groups: list[list[int]], num_instances: int, name: str) -> ShardGroups:
        """The shard groups of this rank's data-parallel group, divided into this many instances."""
        mine = next(ranks for ranks in groups if self._rank in ranks)
        return ShardGroups(
            self.make(groups, name),
            self.make(shards_of(groups, num_instances), f"{name}_shard"),
            self.make(copies_of(groups, num_instances), f"{name}_copies"),
            tuple(map(tuple, instances_of(mine, num_instances))),
        )

    def _one(self, ranks: tuple[int, ...], name: str) -> ProcessGroup | None:
        if ranks not in self._made:
            made = dist.new_group(list(ranks), timeout=self._timeout, group_desc=name)
            self._made[ranks] = made if self._rank in ranks else None
        return self._made[ranks]


T = TypeVar("T")


def broadcast_object(value: T, group: ProcessGroup | None, source: int = 0) -> T:
    """The value of one rank of the group, on all its ranks. source: its place in the group."""
    if group is None:
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, group_src=source, group=group)
    received: T = box[0]
    return received


def gather_objects(value: T, group: ProcessGroup | None) -> list[T]:
    """The values of all ranks of the group, in order, on all its ranks."""
    if group is None:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def gather_or_raise(
    produce: Callable[[], T], group: ProcessGroup | None, doing: str = "load", give: bool = True
) -> list[T]:
    """What `produce` returned on each rank; if it failed on one, all ranks raise its error.

    doing: verb for messages. give: False where each rank needs only its own value, which need not
    be picklable."""
    if group is None:
        return [produce()]
    own: Exception | None = None
    value: T | None = None
    failure: tuple[str, str] | None = None
    try:
        value = produce()
    except Exception as error:
        kind = lack_of_memory(error) or type(error)
        own, failure = error, (kind.__name__, str(error))
    try:
        outcomes = gather_objects((value if give else None, failure), group)
    except RuntimeError as error:
        lost = own or CommunicationError(f"a rank was lost during a {doing}: {error}")
        raise lost from error
    if own is not None:
        raise own
    for rank, (_, failed) in enumerate(outcomes):
        if failed is not None:
            raise _error_of_rank(dist.get_global_rank(group, rank), doing, *failed)
    values: list[Any] = [found for found, _ in outcomes]
    if not give:
        values[dist.get_rank(group)] = value
    return values


def _error_of_rank(rank: int, doing: str, kind: str, message: str) -> Exception:
    """The error of another rank, in the class that gives the same exit status."""
    cls = getattr(errors, kind, None)
    # A rank may pass on the error of another one.
    is_named = re.match(rf"rank \d+ failed to {doing}: ", message)
    text = message if is_named else f"rank {rank} failed to {doing}: {message}"
    if isinstance(cls, type) and issubclass(cls, TrainyardError):
        return cls(text)
    return RuntimeError(f"{text} ({kind})")


@contextmanager
def process_groups(config: ParallelConfig, device: torch.device) -> Iterator[ProcessGroups]:
    """The groups of the ranks that the launcher started; a context manager."""
    rank, world_size, _, _ = rank_of_environment()
    dims = dims_of(config, world_size)
    if world_size == 1:
        yield ProcessGroups(dims, rank)
        return
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    join_ranks(config, device, dims.describe(), timeout)
    try:
        experts = expert_dims_of(config, dims)
        yield build_groups(dims, rank, timeout, experts, config.num_instances)
    finally:
        dist.destroy_process_group()
        wait_for_gloo()
