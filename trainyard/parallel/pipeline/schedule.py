"""What each pipeline rank does, in which order: lists of actions, and what passes between ranks.

Pure; no clock and no torch. The orders are Megatron-LM's: 1F1B (arXiv:2104.04473, section 2.2.1),
interleaved 1F1B (section 2.2.2) with groups of any number of micro-batches, and forward alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from trainyard.errors import ConfigError

Kind = Literal["F", "B"]

GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"


class Action(NamedTuple):
    """Forward or backward of one micro-batch through one chunk of a rank."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.chunk}"


PipelineSchedule = tuple[tuple[Action, ...], ...]
"""The actions of each rank in order."""


class Message(NamedTuple):
    """Activations (F) or their gradient (B) of a micro-batch on the way to a stage."""

    kind: Kind
    microbatch: int
    stage: int
    """Which takes it in."""
    source: int
    """Pipeline rank that sends."""
    target: int
    """Pipeline rank that receives."""

    @property
    def channel(self) -> tuple[Kind, int, int]:
        """Messages of one channel arrive in the order in which they are sent."""
        return self.kind, self.source, self.target

    def __str__(self) -> str:
        what = "activations" if self.kind == "F" else "gradient"
        return (
            f"{what} of micro-batch {self.microbatch} from pipeline rank {self.source} to "
            f"{self.target}"
        )


# --- orders -----------------------------------------------------------------------------------


def build_pipeline_schedule(
    pp: int,
    chunks: int,
    num_microbatches: int,
    group_size: int | None = None,
    *,
    forward_only: bool = False,
) -> PipelineSchedule:
    """The actions of all ranks for a step. group_size: micro-batches that pass a chunk in a row;
    unset: the smallest that fits."""
    assert pp > 0
    assert chunks > 0
    assert num_microbatches > 0
    order = [(m, 0) for m in range(num_microbatches)]
    if chunks > 1:
        group_size = choose_group_size(pp, num_microbatches, group_size)
        order = interleaved_order(chunks, num_microbatches, group_size)
    forwards = [Action("F", m, c) for m, c in order]
    if forward_only:
        return (tuple(forwards),) * pp
    backwards = [Action("B", m, chunks - 1 - c) for m, c in order]
    return tuple(
        tuple(_merge(forwards, backwards, num_warmup(pp, rank, chunks, group_size or 0)))
        for rank in range(pp)
    )


def interleaved_order(chunks: int, num_microbatches: int, group_size: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of each forward pass: a group of micro-batches passes all chunks, then
    the next group. Backward passes take the chunks the other way round."""
    return [
        (microbatch, chunk)
        for begin in range(0, num_microbatches, group_size)
        for chunk in range(chunks)
        for microbatch in range(begin, min(begin + group_size, num_microbatches))
    ]


def num_warmup(pp: int, rank: int, chunks: int, group_size: int) -> int:
    """Forward passes before the first that a backward pass follows."""
    if chunks == 1:
        return pp - rank - 1
    return 2 * (pp - rank - 1) + (chunks - 1) * group_size


def _merge(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> list[Action]:
    warmup = min(warmup, len(forwards))
    actions = list(forwards[:warmup])
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        actions += (forward, backward)
    return actions + list(backwards[len(forwards) - warmup :])


# --- groups of micro-batches ------------------------------------------------------------------


def fits_group_size(pp: int, num_microbatches: int, group_size: int) -> bool:
    """A group smaller than the pipeline would make ranks wait for each other, or forever."""
    rest = num_microbatches % group_size
    return pp <= group_size <= num_microbatches and (rest == 0 or rest >= pp)


def choose_group_size(pp: int, num_microbatches: int, wanted: int | None = None) -> int:
    """The group size that was asked for, if it fits; else the smallest that does.

    All micro-batches in one group always work, with fewer than `pp` of them as well."""
    fitting = [n for n in range(pp, num_microbatches) if fits_group_size(pp, num_microbatches, n)]
    fitting.append(num_microbatches)
    if wanted is None:
        return fitting[0]
    if wanted not in fitting:
        near = sorted(sorted(fitting, key=lambda n: (abs(n - wanted), n))[:2])
        raise ConfigError(
            f"{GROUP} {wanted}: groups must have between --pipeline-model-parallel-size ({pp}) and "
            f"all {num_microbatches} micro-batches of a step, the last one too; choose "
            f"{' or '.join(map(str, near))}"
        )
    return wanted


# --- what passes between ranks ----------------------------------------------------------------


def input_of(action: Action, rank: int, pp: int, chunks: int) -> Message | None:
    """What must have arrived before an action of `rank`; None at the ends of the model."""
    stage = action.chunk * pp + rank
    if action.kind == "F":
        source = None if stage == 0 else (rank - 1) % pp
    else:
        source = None if stage == pp * chunks - 1 else (rank + 1) % pp
    if source is None:
        return None
    return Message(action.kind, action.microbatch, stage, source, rank)


def output_of(action: Action, rank: int, pp: int, chunks: int) -> Message | None:
    """What an action of `rank` sends on; None at the ends of the model."""
    step = 1 if action.kind == "F" else -1
    stage = action.chunk * pp + rank + step
    if not 0 <= stage < pp * chunks:
        return None
    return Message(action.kind, action.microbatch, stage, rank, stage % pp)
