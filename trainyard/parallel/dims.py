"""The grids of ranks: pure arithmetic, no torch.

Ranks are numbered through a grid of five axes: tp tensor, cp context, ep expert, dp data, pp
pipeline parallel. The order names the axes from the one whose neighbours have consecutive numbers
on, so that those who talk most can sit in one machine: tp-cp-ep-dp-pp as in Megatron-LM, or any
other.

Routed experts have a grid of their own over the same ranks (`ExpertDims`), in the same pipeline
stages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Literal

from trainyard.errors import ConfigError
from trainyard.parallel.config import (
    AXES,
    CP,
    DEFAULT_ORDER,
    EP,
    ETP,
    PP,
    TP,
    ParallelConfig,
)
from trainyard.parallel.data_config import INSTANCES
from trainyard.parallel.divisible import divisors, multiples, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Coordinates of a rank, one per axis."""

    tp: int = 0
    cp: int = 0
    ep: int = 0
    dp: int = 0
    pp: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDims:
    """The degrees of a run; their product is the number of ranks."""

    dp: int = 1
    """Ranks that hold the same weights and see different samples."""
    tp: int = 1
    """Ranks that share each matrix."""
    pp: int = 1
    """Ranks that share the layers."""
    cp: int = 1
    """Ranks that hold the same weights and share each sequence."""
    ep: int = 1
    """Always 1: the experts have a grid of their own (`ExpertDims`); the axis is in `order`."""
    order: str = DEFAULT_ORDER
    """Axes, fastest first."""

    def __post_init__(self) -> None:
        """Refuse degrees below 1 and orders that are no permutation of the axes."""
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ConfigError(f"the {axis} size must be at least 1, got {getattr(self, axis)}")
        if sorted(self.order.split("-")) != sorted(AXES):
            raise ConfigError(
                f"the rank order {self.order} must name each of {', '.join(AXES)} once, as in "
                f"{DEFAULT_ORDER}"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.size(axis) for axis in AXES)

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        size: int = getattr(self, axis)
        return size

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of a rank."""
        assert 0 <= rank < self.world_size, (rank, self)
        places = {}
        for axis in self.order.split("-"):
            rank, places[axis] = divmod(rank, self.size(axis))
        return Coordinates(**places)

    def rank_of(self, *, tp: int = 0, cp: int = 0, ep: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank at these coordinates."""
        places = {"tp": tp, "cp": cp, "ep": ep, "dp": dp, "pp": pp}
        rank, stride = 0, 1
        for axis in self.order.split("-"):
            assert 0 <= places[axis] < self.size(axis), (axis, places[axis], self)
            rank += places[axis] * stride
            stride *= self.size(axis)
        return rank

    def group_ranks(self, *axes: str) -> list[list[int]]:
        """Every set of ranks that differ in these axes only, ascending; each rank is in one.

        `group_ranks("tp")` are the tensor-parallel groups, `group_ranks("dp", "cp")` the sets of
        ranks that hold the same weights."""
        unknown = set(axes) - set(AXES)
        assert not unknown, unknown
        order = self.order.split("-")
        fixed = [axis for axis in reversed(order) if axis not in axes]
        varied = [axis for axis in reversed(order) if axis in axes]
        return [
            [self.rank_of(**outer, **inner) for inner in self._places(varied)]
            for outer in self._places(fixed)
        ]

    def _places(self, axes: list[str]) -> list[dict[str, int]]:
        """All places along these axes, the last axis moving fastest."""
        return [
            dict(zip(axes, places, strict=True))
            for places in product(*(range(self.size(axis)) for axis in axes))
        ]

    def describe(self) -> str:
        """`tp=2 cp=1 dp=4 pp=2`, for a log line."""
        names = [axis for axis in AXES if axis != "ep" or self.ep > 1]
        return " ".join(f"{axis}={self.size(axis)}" for axis in names)


def dims_of(config: ParallelConfig, world_size: int) -> ParallelDims:
    """The grid of `world_size` ranks; what tensor, pipeline and context leave is data parallel."""
    unit = config.model_ranks
    if world_size % unit:
        degrees = {
            TP: config.tensor_model_parallel_size,
            PP: config.pipeline_model_parallel_size,
            CP: config.context_parallel_size,
        }
        product = " x ".join(f"{flag} ({size})" for flag, size in degrees.items())
        ranks = "1 rank does" if world_size == 1 else f"{world_size} ranks do"
        choices = " or ".join(str(count) for count in multiples(world_size, unit))
        raise ConfigError(
            f"{ranks} not fit the layout: {product} = {unit} must divide the number of ranks; "
            f"the quotient is the data-parallel size; start {choices} ranks, or change a degree"
        )
    dims = ParallelDims(
        dp=world_size // unit,
        tp=config.tensor_model_parallel_size,
        pp=config.pipeline_model_parallel_size,
        cp=config.context_parallel_size,
        order=config.order,
    )
    _check_instances(
        config, dims.dp * dims.cp, f"data-parallel size ({dims.dp}) x {CP} ({dims.cp})"
    )
    return dims


def _check_instances(config: ParallelConfig, num_replicas: int, written: str) -> None:
    """Raise ConfigError for instances that do not divide the ranks that shard something."""
    count = config.num_instances
    if num_replicas % count:
        raise ConfigError(
            f"{INSTANCES} ({count}) must divide the {written} = {num_replicas}; "
            f"{nearest(INSTANCES, divisors(num_replicas, count))}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertDims:
    """The grid of routed experts: the ranks of each pipeline stage, in order, by expert tensor
    parallelism first, then expert parallelism, then data parallelism of experts. For the default
    order of axes it is Megatron-LM's."""

    stages: tuple[tuple[int, ...], ...]
    """Ranks of each pipeline stage, ascending."""
    tp: int = 1
    """Ranks that share each matrix of an expert."""
    ep: int = 1
    """Ranks that share the experts."""

    def coordinates(self, rank: int) -> Coordinates:
        """The tp, ep and dp of a rank."""
        pp, stage = next((n, ranks) for n, ranks in enumerate(self.stages) if rank in ranks)
        return self._at(pp, stage.index(rank))

    def _at(self, pp: int, place: int) -> Coordinates:
        """The coordinates of the rank at this place of a stage."""
        rest, tp = divmod(place, self.tp)
        dp, ep = divmod(rest, self.ep)
        return Coordinates(tp=tp, ep=ep, dp=dp, pp=pp)

    def group_ranks(self, *axes: Literal["tp", "ep", "dp", "pp"]) -> list[list[int]]:
        """Every set of ranks that differ in these axes only, ascending; each rank is in one."""
        fixed = [axis for axis in ("tp", "ep", "dp", "pp") if axis not in axes]
        groups: dict[tuple[int, ...], list[int]] = {}
        for pp, stage in enumerate(self.stages):
            for place, rank in enumerate(stage):
                own = self._at(pp, place)
                groups.setdefault(tuple(getattr(own, axis) for axis in fixed), []).append(rank)
        return [sorted(ranks) for ranks in groups.values()]


def expert_dims_of(config: ParallelConfig, dense: ParallelDims) -> ExpertDims:
    """The grid of routed experts over the ranks of the dense grid. Raises ConfigError for degrees
    that do not divide the ranks of a pipeline stage."""
    ep, etp = config.expert_model_parallel_size, config.expert_tp
    stages = sorted(dense.group_ranks("tp", "cp", "dp"))
    if len(stages[0]) % (ep * etp):
        raise ConfigError(
            f"{EP} ({ep}) x {ETP} ({etp}) must divide the ranks of a pipeline stage: {TP} "
            f"({dense.tp}) x {CP} ({dense.cp}) x the data-parallel size ({dense.dp}) = "
            f"{len(stages[0])}; change a degree, or start more ranks"
        )
    if (ep, etp) != (1, dense.tp):
        replicas = len(stages[0]) // (ep * etp)
        _check_instances(config, replicas, "data-parallel size of experts")
    return ExpertDims(stages=tuple(map(tuple, stages)), tp=etp, ep=ep)
