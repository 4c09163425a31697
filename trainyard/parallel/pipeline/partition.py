"""Which layers each pipeline rank holds.

A stage is what one rank runs in one go; tokens pass stage 0, 1, 2, ... Without virtual stages a
rank has one, otherwise `chunks` of them: chunk v of rank p is stage v x pp + p. Megatron-LM's flags
in, ranges of global layer numbers out. Pure, standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from trainyard.errors import ConfigError
from trainyard.parallel.pipeline.layout import FLAG as LAYOUT
from trainyard.parallel.pipeline.layout import check_layout, parse_layout

PP = "--pipeline-model-parallel-size"
FIRST = "--decoder-first-pipeline-num-layers"
LAST = "--decoder-last-pipeline-num-layers"
PER_VIRTUAL_STAGE = "--num-layers-per-virtual-pipeline-stage"
VIRTUAL_STAGES = "--num-virtual-stages-per-pipeline-rank"
WITH_EMBEDDING = "--account-for-embedding-in-pipeline-split"
WITH_LOSS = "--account-for-loss-in-pipeline-split"


@dataclass(frozen=True, slots=True)
class StageLayers:
    """What one stage holds; no layers at all is allowed."""

    layers: range
    """Global numbers of its transformer layers."""
    has_embedding: bool = False
    has_output: bool = False
    """Final norm, output layer and loss."""


Partition = tuple[tuple[StageLayers, ...], ...]
"""Layers by pipeline rank, then by chunk."""


class SplitOptions(Protocol):
    """The flags that decide, by their names with underscores."""

    @property
    def pipeline_model_parallel_size(self) -> int: ...  # noqa: D102
    @property
    def num_layers_per_virtual_pipeline_stage(self) -> int | None: ...  # noqa: D102
    @property
    def num_virtual_stages_per_pipeline_rank(self) -> int | None: ...  # noqa: D102
    @property
    def decoder_first_pipeline_num_layers(self) -> int | None: ...  # noqa: D102
    @property
    def decoder_last_pipeline_num_layers(self) -> int | None: ...  # noqa: D102
    @property
    def account_for_embedding_in_pipeline_split(self) -> bool: ...  # noqa: D102
    @property
    def account_for_loss_in_pipeline_split(self) -> bool: ...  # noqa: D102
    @property
    def pipeline_model_parallel_layout(self) -> str | None: ...  # noqa: D102


def partition(options: SplitOptions, num_layers: int) -> Partition:
    """The stages of every rank; ConfigError if the flags do not fit."""
    pp = options.pipeline_model_parallel_size
    if pp < 1:
        raise ConfigError(f"{PP} must be at least 1, got {pp}")
    _check_combination(options)
    if options.pipeline_model_parallel_layout is not None:
        return _by_layout(options.pipeline_model_parallel_layout, num_layers, pp)
    if pp == 1:
        return ((StageLayers(range(num_layers), True, True),),)
    per_rank = _layers_per_rank(options, num_layers)
    chunks = _num_chunks(options, per_rank)
    counts = _per_stage(per_rank, chunks)
    # What stands for the embedding and the loss is no transformer layer.
    counts[0] -= options.account_for_embedding_in_pipeline_split
    counts[-1] -= options.account_for_loss_in_pipeline_split
    if min(counts) < 0:
        raise ConfigError(
            f"{WITH_EMBEDDING} and {WITH_LOSS} need room in the first and last stage, and stages "
            f"have {per_rank[0] // chunks} layers; take a smaller {PP} ({pp}) or fewer virtual "
            "stages"
        )
    return arrange(counts, pp)


def arrange(counts: list[int], pp: int) -> Partition:
    """Give stage after stage its next layers; stage i is chunk i // pp of rank i % pp."""
    last = len(counts) - 1
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    stages = [
        StageLayers(range(end - count, end), has_embedding=i == 0, has_output=i == last)
        for i, (count, end) in enumerate(zip(counts, ends, strict=True))
    ]
    return tuple(tuple(stages[rank::pp]) for rank in range(pp))


def stages_in_order(split: Partition) -> Iterator[StageLayers]:
    """The stages as tokens pass them."""
    for chunk in zip(*split, strict=True):
        yield from chunk


# --- the flags --------------------------------------------------------------------------------


def _check_combination(options: SplitOptions) -> None:
    given = {
        PER_VIRTUAL_STAGE: options.num_layers_per_virtual_pipeline_stage,
        VIRTUAL_STAGES: options.num_virtual_stages_per_pipeline_rank,
        FIRST: options.decoder_first_pipeline_num_layers,
        LAST: options.decoder_last_pipeline_num_layers,
        WITH_EMBEDDING: options.account_for_embedding_in_pipeline_split or None,
        WITH_LOSS: options.account_for_loss_in_pipeline_split or None,
    }
    named = [flag for flag, value in given.items() if value is not None]
    for flag in named:
        if given[flag] < 1:  # type: ignore[operator]
            raise ConfigError(f"{flag} must be at least 1, got {given[flag]}")
    if options.pipeline_model_parallel_layout is not None and named:
        raise ConfigError(f"{LAYOUT} says all that {named[0]} could; give one of the two")
    if PER_VIRTUAL_STAGE in named and VIRTUAL_STAGES in named:
        raise ConfigError(f"{PER_VIRTUAL_STAGE} and {VIRTUAL_STAGES} say the same; give one")
    ends = [flag for flag in (FIRST, LAST) if flag in named]
    accounts = [flag for flag in (WITH_EMBEDDING, WITH_LOSS) if flag in named]
    if ends and accounts:
        raise ConfigError(f"{accounts[0]} spreads the layers evenly, {ends[0]} does not; give one")
    if ends and PER_VIRTUAL_STAGE in named:
        raise ConfigError(f"with {ends[0]} stages differ; give {VIRTUAL_STAGES}, which works")
    if options.pipeline_model_parallel_size == 1 and set(named) - set(accounts):
        raise ConfigError(f"{named[0]} needs {PP} above 1")


def _layers_per_rank(options: SplitOptions, num_layers: int) -> list[int]:
    """Layers of each rank, embedding and loss included where they count as layers."""
    pp = options.pipeline_model_parallel_size
    first = options.decoder_first_pipeline_num_layers
    last = options.decoder_last_pipeline_num_layers
    if first is not None or last is not None:
        return _uneven(num_layers, pp, first, last)
    extra = {
        WITH_EMBEDDING: options.account_for_embedding_in_pipeline_split,
        WITH_LOSS: options.account_for_loss_in_pipeline_split,
    }
    total = num_layers + sum(extra.values())
    if total % pp:
        added = "".join(f" + 1 by {flag}" for flag, counts in extra.items() if counts)
        raise ConfigError(
            f"--num-layers ({num_layers}{added}) must be divisible by {PP} ({pp}); "
            f"{nearest(PP, total, pp)}; or divide unevenly with {FIRST}, {LAST} or {LAYOUT}"
        )
    return [total // pp] * pp


def _uneven(num_layers: int, pp: int, first: int | None, last: int | None) -> list[int]:
    ends = [f"{FIRST} ({first})"] * (first is not None) + [f"{LAST} ({last})"] * (last is not None)
    left, stages = num_layers - (first or 0) - (last or 0), pp - len(ends)
    named = " and ".join(ends)
    if left < 0 or (stages == 0 and left):
        raise ConfigError(
            f"{named} must add up to --num-layers ({num_layers}) or, with more stages "
            f"between them, to less"
        )
    if stages and left % stages:
        fitting = [n for n in range(1, num_layers) if (num_layers - n) % stages == 0]
        wanted = (first or 0) + (last or 0)
        near = sorted(fitting, key=lambda n: (abs(n - wanted), n))[:2]
        total = "together " if len(ends) == 2 else ""
        raise ConfigError(
            f"{named} of --num-layers ({num_layers}) leave {left} layers, which {stages} stages "
            f"cannot share evenly; choose {total}{_either(sorted(near))}"
        )
    middle = [left // stages] * stages if stages else []
    return [n for n in (first, *middle, last) if n is not None]


def _num_chunks(options: SplitOptions, per_rank: list[int]) -> int:
    """Stages of each rank."""
    per_chunk = options.num_layers_per_virtual_pipeline_stage
    if per_chunk is not None:
        _check_even(per_rank[0], PER_VIRTUAL_STAGE, per_chunk)
        return per_rank[0] // per_chunk
    chunks = options.num_virtual_stages_per_pipeline_rank or 1
    for layers in per_rank:
        _check_even(layers, VIRTUAL_STAGES, chunks)
    return chunks


def _check_even(layers: int, flag: str, divisor: int) -> None:
    if layers % divisor:
        raise ConfigError(
            f"the {layers} layers of a pipeline rank must be divisible by {flag} ({divisor}); "
            f"{nearest(flag, layers, divisor)}"
        )


def _per_stage(per_rank: list[int], chunks: int) -> list[int]:
    return [layers // chunks for layers in per_rank] * chunks


def _by_layout(text: str, num_layers: int, pp: int) -> Partition:
    stages = parse_layout(text)
    check_layout(text, stages, num_layers)
    if pp == 1 < len(stages):
        raise ConfigError(
            f"{LAYOUT} {text!r} has {len(stages)} stages, and {PP} is 1; give {PP} "
            f"{len(stages)}, or leave out the |"
        )
    if len(stages) % pp:
        raise ConfigError(
            f"{LAYOUT} {text!r} has {len(stages)} stages, which must be divisible by {PP} ({pp}); "
            f"{nearest(PP, len(stages), pp)}, or add or remove a |"
        )
    return arrange([sum(item.sign == "t" for item in stage) for stage in stages], pp)


# --- words ------------------------------------------------------------------------------------


def nearest(flag: str, value: int, wanted: int) -> str:
    """`choose --flag 3 or 4`: the divisors of `value` on both sides of the one wanted."""
    divisors = [d for d in range(1, value + 1) if value % d == 0]
    below = [d for d in divisors if d < wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return f"choose {flag} {_either(below + above)}"


def _either(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))
