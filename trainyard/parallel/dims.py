"""The grid of ranks: pure arithmetic, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.errors import ConfigError
from trainyard.parallel.config import ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDims:
    """The degrees of a run; their product is the number of ranks."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.dp * self.tp * self.pp * self.cp

    def dp_rank(self, rank: int) -> int:
        """Place of a rank among those that hold the same weights."""
        assert self.tp == self.pp == self.cp == 1
        return rank


def dims_of(config: ParallelConfig, world_size: int) -> ParallelDims:
    """The grid for a number of ranks: what tensor, pipeline and context leave is data parallel."""
    tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    cp = config.context_parallel_size
    if world_size % (tp * pp * cp):
        raise ConfigError(
            f"{world_size} ranks do not divide into --tensor-model-parallel-size ({tp}) x "
            f"--pipeline-model-parallel-size ({pp}) x --context-parallel-size ({cp})"
        )
    return ParallelDims(dp=world_size // (tp * pp * cp), tp=tp, pp=pp, cp=cp)
