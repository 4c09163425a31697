"""Divides the layers over the pipeline ranks of Megatron-LM's files, by the target options."""

from __future__ import annotations

from stages.reshard.config import FIRST, LAST, PER_VIRTUAL_STAGE, PP, VIRTUAL_STAGES, ReshardConfig
from trainyard.errors import ConfigError
from trainyard.parallel.pipeline.partition import Partition, arrange, nearest


def target_split(config: ReshardConfig, num_layers: int) -> Partition:
    """The layers of every stage. Raises ConfigError, with sizes that work, if the options do not
    fit."""
    per_rank = _layers_per_rank(config, num_layers)
    chunks = _virtual_stages(config, per_rank)
    counts = [layers // chunks for layers in per_rank] * chunks
    return arrange(counts, len(per_rank))


def _layers_per_rank(config: ReshardConfig, num_layers: int) -> list[int]:
    pp = config.pipeline_parallel_size
    if config.ends:
        return _uneven(config, num_layers, pp)
    if num_layers % pp:
        unevenly = f", or divide them unevenly with {FIRST} or {LAST}" * (config.saver == "core")
        raise ConfigError(
            f"the {num_layers} layers of the model must be divisible by {PP} ({pp}); "
            f"{nearest(PP, num_layers, pp)}{unevenly}"
        )
    return [num_layers // pp] * pp


def _uneven(config: ReshardConfig, num_layers: int, pp: int) -> list[int]:
    """Layers of each rank: as given for the first and last, the rest shared evenly."""
    first, last = config.ends.get(FIRST), config.ends.get(LAST)
    given = sum(config.ends.values())
    ranks = pp - len(config.ends)
    if _fits(num_layers, ranks, given):
        middle = [(num_layers - given) // ranks] * ranks if ranks else []
        return [layers for layers in (first, *middle, last) if layers is not None]
    named = " and ".join(f"{flag} ({layers})" for flag, layers in config.ends.items())
    totals = [n for n in range(len(config.ends), num_layers + 1) if _fits(num_layers, ranks, n)]
    near = sorted(sorted(totals, key=lambda n: (abs(n - given), n))[:2])
    together = "together " if len(config.ends) > 1 else ""
    choice = f"; choose {together}{' or '.join(map(str, near))}" if near else ""
    left = "none over" if ranks == 0 else f"the same number for each of the other {ranks} ranks"
    raise ConfigError(
        f"{named} of the {num_layers} layers of the model must leave {left} ({PP} {pp}){choice}"
    )


def _fits(num_layers: int, ranks: int, given: int) -> bool:
    """Whether `ranks` other ranks can share the layers that are left evenly, at least one each."""
    left = num_layers - given
    return left == 0 if ranks == 0 else left >= ranks and left % ranks == 0


def _virtual_stages(config: ReshardConfig, per_rank: list[int]) -> int:
    """Stages of each pipeline rank; 1 without virtual stages."""
    per_stage = config.target_num_layers_per_virtual_pipeline_stage
    stages = config.target_num_virtual_stages_per_pipeline_rank or 1
    flag, divisor = (
        (VIRTUAL_STAGES, stages) if per_stage is None else (PER_VIRTUAL_STAGE, per_stage)
    )
    for layers in per_rank:
        if layers % divisor:
            raise ConfigError(
                f"the {layers} layers of a pipeline rank must be divisible by {flag} ({divisor}); "
                f"{nearest(flag, layers, divisor)}"
            )
    return stages if per_stage is None else per_rank[0] // per_stage
