"""Simulates a schedule without processes: start and end of each action, deadlocks, idle time of
ranks, stored activations.

There are two models of communication. `simulate` buffers every message, and shows what the schedule
itself costs. `simulate_rendezvous` has no buffers: a message passes when both sides have reached
it, as over NCCL. A rank does one thing after another, as streams behind one hardware queue do
(CUDA_DEVICE_MAX_CONNECTIONS=1). A schedule that finishes without buffers finishes everywhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from trainyard.parallel.pipeline.schedule import (
    Action,
    Message,
    PipelineSchedule,
    input_of,
    output_of,
)

Cost = Callable[[int, Action], float]
"""Duration of an action of a rank."""

Times = tuple[tuple[float, ...], ...]
"""Times by rank, then by action."""


def unit_cost(rank: int, action: Action) -> float:
    """A backward pass takes twice a forward pass, on all ranks."""
    return 1.0 if action.kind == "F" else 2.0


@dataclass(frozen=True, slots=True)
class Simulation:
    """When everything happens; time begins at 0."""

    schedule: PipelineSchedule
    starts: Times
    ends: Times

    @property
    def makespan(self) -> float:
        """The end of the last action."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    def idle_share(self, rank: int) -> float:
        """Share of the step in which a rank has nothing to do."""
        busy = sum(e - s for s, e in zip(self.starts[rank], self.ends[rank], strict=True))
        return 1.0 - busy / self.makespan

    @property
    def bubble(self) -> float:
        """Share of all ranks' time that is idle."""
        ranks = range(len(self.schedule))
        return sum(map(self.idle_share, ranks)) / len(self.schedule)


class DeadlockError(Exception):
    """Ranks deadlock."""


def simulate(schedule: PipelineSchedule, chunks: int, cost: Cost = unit_cost) -> Simulation:
    """Messages are buffered; an action starts when its rank is free and its input has arrived."""
    arrivals: dict[Message, float] = {}
    return _play(
        schedule, lambda rank, times: _buffered(schedule, rank, chunks, cost, arrivals, times)
    )


def simulate_rendezvous(
    schedule: PipelineSchedule,
    chunks: int,
    receives: Sequence[Sequence[Sequence[Message]]],
    cost: Cost = unit_cost,
) -> Simulation:
    """Messages pass without buffers, receives being posted as `receives` says.

    receives: by rank, by slot; slot 0 lies before everything, slot i + 1 between the arrival of the
    input of action i and its computation. One send and one receive of a channel at a time."""
    wires: dict[tuple[object, ...], _Wire] = defaultdict(_Wire)
    return _play(
        schedule,
        lambda rank, times: _meeting(schedule, rank, chunks, receives[rank], cost, wires, times),
    )


# --- one rank each ----------------------------------------------------------------------------

_Times = tuple[list[float], list[float]]
_Rank = Generator[str, None, None]
"""A rank that yields, saying why, whenever it has to wait for others."""


def _buffered(
    schedule: PipelineSchedule,
    rank: int,
    chunks: int,
    cost: Cost,
    arrivals: dict[Message, float],
    times: _Times,
) -> _Rank:
    pp, now = len(schedule), 0.0
    for action in schedule[rank]:
        needed = input_of(action, rank, pp, chunks)
        if needed is not None:
            while needed not in arrivals:
                yield f"{action} needs {needed}"
            now = max(now, arrivals.pop(needed))
        now = _compute(now, cost(rank, action), times)
        made = output_of(action, rank, pp, chunks)
        if made is not None:
            arrivals[made] = now


def _compute(now: float, duration: float, times: _Times) -> float:
    times[0].append(now)
    times[1].append(now + duration)
    return now + duration


class _Wire:
    """One channel: what both ends have come to, and when it passed."""

    def __init__(self) -> None:
        self.sent: list[tuple[Message, float]] = []
        self.posted: list[tuple[Message, float]] = []

    def passed(self, number: int) -> float | None:
        """When the n-th message had passed; None while one end is missing."""
        if number >= len(self.sent) or number >= len(self.posted):
            return None
        (sent, sent_at), (posted, posted_at) = self.sent[number], self.posted[number]
        if sent != posted:
            raise DeadlockError(f"{sent} meets a receive of {posted}")
        return max(sent_at, posted_at)


def _meeting(
    schedule: PipelineSchedule,
    rank: int,
    chunks: int,
    slots: Sequence[Sequence[Message]],
    cost: Cost,
    wires: dict[tuple[object, ...], _Wire],
    times: _Times,
) -> _Rank:
    pp, now = len(schedule), 0.0
    num_received: dict[tuple[object, ...], int] = defaultdict(int)

    def post(messages: Sequence[Message], now: float) -> Generator[str, None, float]:
        for message in messages:
            wire = wires[message.channel]
            now = yield from _previous(wire, len(wire.posted), now, f"posting {message}")
            wire.posted.append((message, now))
        return now

    now = yield from post(slots[0], now)
    for action, slot in zip(schedule[rank], slots[1:], strict=True):
        needed = input_of(action, rank, pp, chunks)
        if needed is not None:
            number = num_received[needed.channel]
            num_received[needed.channel] += 1
            now = yield from _passing(wires[needed.channel], number, now, f"{action}: {needed}")
        now = yield from post(slot, now)
        now = _compute(now, cost(rank, action), times)
        made = output_of(action, rank, pp, chunks)
        if made is not None:
            wire = wires[made.channel]
            now = yield from _previous(wire, len(wire.sent), now, f"sending {made}")
            wire.sent.append((made, now))


def _previous(wire: _Wire, number: int, now: float, why: str) -> Generator[str, None, float]:
    """Wait until the message before the n-th has passed."""
    return now if number == 0 else (yield from _passing(wire, number - 1, now, why))


def _passing(wire: _Wire, number: int, now: float, why: str) -> Generator[str, None, float]:
    """Wait until the n-th message has passed; the time after that."""
    while (passed := wire.passed(number)) is None:
        yield why
    return max(now, passed)


# --- all ranks --------------------------------------------------------------------------------


def _play(schedule: PipelineSchedule, start: Callable[[int, _Times], _Rank]) -> Simulation:
    """Run ranks in turn until all are done, or none can continue."""
    times: list[_Times] = [([], []) for _ in schedule]
    running = {rank: start(rank, times[rank]) for rank in range(len(schedule))}
    waiting: dict[int, str] = {}
    seen = -1
    while running:
        for rank, process in list(running.items()):
            try:
                waiting[rank] = next(process)
            except StopIteration:
                del running[rank]
                waiting.pop(rank, None)
        done = sum(len(starts) for starts, _ in times)
        if running and done == seen and len(waiting) == len(running):
            raise DeadlockError("; ".join(f"rank {r}: {why}" for r, why in waiting.items()))
        seen = done
    starts, ends = zip(*times, strict=True)
    return Simulation(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


# --- kept activations -------------------------------------------------------------------------


def peak_in_flight(actions: Sequence[Action]) -> int:
    """Most micro-batches (of one chunk each) that a rank holds activations of at a time."""
    held = peak = 0
    for action in actions:
        held += 1 if action.kind == "F" else -1
        peak = max(peak, held)
    return peak
