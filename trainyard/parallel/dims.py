"""The grid of ranks: pure arithmetic, no torch.

Ranks are numbered through a grid of five axes: tp tensor, cp context, ep expert, dp data, pp
pipeline parallel. The order names the axes from the one whose neighbours have consecutive numbers
on, so that those who talk most can sit in one machine: tp-cp-ep-dp-pp as in Megatron-LM, or any
other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from trainyard.errors import ConfigError
from trainyard.parallel.config import AXES, CP, DEFAULT_ORDER, PP, TP, ParallelConfig
from trainyard.parallel.divisible import multiples


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
    """Ranks that share the experts; those of one replica of the dense part are dp x ep."""
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
    return ParallelDims(
        dp=world_size // unit,
        tp=config.tensor_model_parallel_size,
        pp=config.pipeline_model_parallel_size,
        cp=config.context_parallel_size,
        order=config.order,
    )
