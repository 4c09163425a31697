"""Everything that a rank does in a step, computed beforehand: actions, what each takes in and sends
on, when receives are posted, which backward pass is the last of its chunk.

Nothing is negotiated between ranks at run time: all derive the same programs from the same four
numbers. Pure."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from functools import lru_cache

from trainyard.parallel.pipeline.schedule import (
    Action,
    Message,
    build_pipeline_schedule,
    choose_group_size,
    fits_group_size,
    input_of,
    output_of,
)
from trainyard.parallel.pipeline.simulate import Simulation, simulate

Slots = tuple[tuple[Message, ...], ...]


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's step; the tuples run parallel to `actions`."""

    actions: tuple[Action, ...]
    inputs: tuple[Message | None, ...]
    outputs: tuple[Message | None, ...]
    receives: Slots
    """Receives to post: in slot 0 before everything, in slot i + 1 once the input of action i has
    arrived and before it is computed."""
    last_backwards: tuple[bool, ...]
    """Whether a backward pass is the last of its chunk: its gradients are then whole."""


@lru_cache(maxsize=64)
def programs(
    pp: int,
    chunks: int,
    num_microbatches: int,
    group_size: int | None = None,
    forward_only: bool = False,
) -> tuple[Program, ...]:
    """The program of each rank.

    A group size that this number of micro-batches does not allow gives way to one that it does: a
    growing batch size begins with few micro-batches."""
    if chunks > 1:
        fits = group_size and fits_group_size(pp, num_microbatches, group_size)
        group_size = choose_group_size(pp, num_microbatches, group_size if fits else None)
    schedule = build_pipeline_schedule(
        pp, chunks, num_microbatches, group_size, forward_only=forward_only
    )
    ideal = simulate(schedule, chunks)
    return tuple(_program(ideal, rank, chunks) for rank in range(pp))


def _program(ideal: Simulation, rank: int, chunks: int) -> Program:
    actions, pp = ideal.schedule[rank], len(ideal.schedule)
    last = {action.chunk: i for i, action in enumerate(actions) if action.kind == "B"}
    return Program(
        actions=actions,
        inputs=tuple(input_of(action, rank, pp, chunks) for action in actions),
        outputs=tuple(output_of(action, rank, pp, chunks) for action in actions),
        receives=plan_receives(ideal, rank, chunks),
        last_backwards=tuple(last.get(action.chunk) == i for i, action in enumerate(actions)),
    )


def plan_receives(ideal: Simulation, rank: int, chunks: int) -> Slots:
    """When a rank posts each receive: before the message can come, so that no sender waits for it,
    but not much earlier, since a receive that waits holds a buffer and cores of a GPU.

    And never behind a receive of the same channel whose message still needs work of this rank: the
    second would wait in the first one's stream, and the work behind the second in a hardware queue
    that they share."""
    actions, starts, pp = ideal.schedule[rank], ideal.starts[rank], len(ideal.schedule)
    sent = _sending_times(ideal, rank, chunks)
    slots: list[list[Message]] = [[] for _ in range(len(actions) + 1)]
    previous: dict[tuple[object, ...], tuple[int, float]] = {}
    for index, action in enumerate(actions):
        message = input_of(action, rank, pp, chunks)
        if message is None:
            continue
        slot = min(index, _actions_begun(starts, sent[message]))
        before = previous.get(message.channel)
        if before is not None:
            taken_in, earlier = before  # the action that takes the one before, and when it comes
            while slot <= taken_in and (slot == 0 or starts[slot - 1] < earlier):
                slot += 1
        slots[slot].append(message)
        previous[message.channel] = index, sent[message]
    return tuple(map(tuple, slots))


def _sending_times(ideal: Simulation, rank: int, chunks: int) -> dict[Message, float]:
    """When the neighbours have ready what they send to a rank."""
    pp, times = len(ideal.schedule), {}
    for neighbour in {(rank - 1) % pp, (rank + 1) % pp}:
        for action, end in zip(ideal.schedule[neighbour], ideal.ends[neighbour], strict=True):
            message = output_of(action, neighbour, pp, chunks)
            if message is not None and message.target == rank:
                times[message] = end
    return times


def _actions_begun(starts: tuple[float, ...], now: float) -> int:
    """How many actions have begun by a time."""
    return bisect.bisect_right(starts, now)
