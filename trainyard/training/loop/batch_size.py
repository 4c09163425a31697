"""The global batch size of every step: constant, ramped up, or by a table over tokens.

Always a function of the samples consumed so far, so that a resumed run continues the same way. A
batch consists of whole micro-batches of every data-parallel rank. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from trainyard.errors import ConfigError

SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
"""Suffixes of numbers of tokens."""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The batch of a step: global = micro x dp x num_microbatches."""

    global_batch_size: int
    micro_batch_size: int
    dp: int

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of each rank in a step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp)


@dataclass(frozen=True, slots=True)
class BatchSizePhase:
    """A batch size from `begin` consumed samples on."""

    begin: int
    global_batch_size: int


@dataclass(frozen=True, slots=True)
class BatchSizeSchedule:
    """The batch of every step of a run."""

    phases: tuple[BatchSizePhase, ...]
    """Ascending; the first begins at 0."""
    micro_batch_size: int
    dp: int
    ramp_samples: int = 0
    """Length of --rampup-batch-size, 0 without."""
    by_table: bool = False
    """Whether the sizes are those of --step-batch-size-schedule."""

    @property
    def is_constant(self) -> bool:
        """Whether all steps have the same size."""
        return len(self.phases) == 1

    @property
    def final(self) -> BatchSize:
        """The last size, which validation uses, and in which iterations are counted."""
        return self._size(self.phases[-1])

    @property
    def most_microbatches(self) -> int:
        """Of a rank in a step."""
        return max(self._size(phase).num_microbatches for phase in self.phases)

    def at(self, consumed: int) -> BatchSize:
        """The batch of the step after this many samples."""
        return self._size(self._phase(consumed))

    def iterations_to(self, samples: int) -> int:
        """Steps of a run of this many samples, by Megatron-LM's count: a last batch that is not
        full is dropped, but filled up in a ramp or with a table."""
        steps, consumed = self._walk(below=self._begun_below(samples))
        return steps + max(0, samples - consumed) // self.final.global_batch_size

    def samples_after(self, iterations: int) -> int:
        """Samples consumed by this many steps from the start."""
        return self._walk(iterations=iterations)[1]

    def _begun_below(self, samples: int) -> int:
        """A step starts below this many consumed samples, even if the run ends within it. In a
        ramp, as in Megatron-LM, one more starts where the run ends exactly."""
        if self.by_table:
            return samples
        return min(self.ramp_samples, samples) + 1 if self.ramp_samples else 0

    def _walk(self, below: int | None = None, iterations: int | None = None) -> tuple[int, int]:
        """(steps, samples) once `below` samples or `iterations` steps are done; computed per
        phase."""
        done = consumed = 0
        ends: Sequence[int | None] = [phase.begin for phase in self.phases[1:]] + [None]
        for phase, end in zip(self.phases, ends, strict=True):
            size = phase.global_batch_size
            bounds = [] if end is None else [max(0, -(-(end - consumed) // size))]
            if below is not None:
                bounds.append(max(0, -(-(below - consumed) // size)))
            if iterations is not None:
                bounds.append(iterations - done)
            steps = min(bounds)
            done, consumed = done + steps, consumed + steps * size
            if end is not None and consumed < end:
                break
        return done, consumed

    def _phase(self, consumed: int) -> BatchSizePhase:
        return self.phases[bisect_right([phase.begin for phase in self.phases], consumed) - 1]

    def _size(self, phase: BatchSizePhase) -> BatchSize:
        return BatchSize(phase.global_batch_size, self.micro_batch_size, self.dp)


# --- from options -----------------------------------------------------------------------------


def build_batch_size_schedule(
    *,
    global_batch_size: int | None,
    micro_batch_size: int,
    dp: int,
    seq_length: int = 1,
    rampup_batch_size: Sequence[int] = (),
    step_batch_size_schedule: str | None = None,
    decrease_if_needed: bool = False,
) -> BatchSizeSchedule:
    """The schedule of the options; ConfigError if micro-batches do not fill a batch.

    rampup_batch_size: start, increment, samples. step_batch_size_schedule: `tokens:size ...`.
    decrease_if_needed: lower a size that micro-batches do not fill."""
    if rampup_batch_size and step_batch_size_schedule is not None:
        raise ConfigError("give --rampup-batch-size or --step-batch-size-schedule, not both")
    at_once = micro_batch_size * dp
    if step_batch_size_schedule is not None:
        option = "--step-batch-size-schedule"
        phases = _table(step_batch_size_schedule, seq_length, global_batch_size)
    elif rampup_batch_size:
        option = "--rampup-batch-size"
        phases = _ramp(
            rampup_batch_size, at_once if global_batch_size is None else global_batch_size
        )
    else:
        option = "--global-batch-size"
        phases = [BatchSizePhase(0, at_once if global_batch_size is None else global_batch_size)]
    fitted = [
        BatchSizePhase(
            s.begin, _fit(s.global_batch_size, micro_batch_size, dp, option, decrease_if_needed)
        )
        for s in phases
    ]
    return BatchSizeSchedule(
        tuple(_joined(fitted)),
        micro_batch_size,
        dp,
        ramp_samples=rampup_batch_size[2] if rampup_batch_size else 0,
        by_table=step_batch_size_schedule is not None,
    )


def run_length(
    batch_size_schedule: BatchSizeSchedule, train_iters: int | None, train_samples: int | None
) -> tuple[int, int]:
    """(steps, samples) of a run whose length is given in one of them."""
    if (train_iters is None) == (train_samples is None):
        raise ConfigError("give --train-iters or --train-samples, one of them")
    if train_iters is not None:
        return train_iters, batch_size_schedule.samples_after(train_iters)
    assert train_samples is not None
    steps = batch_size_schedule.iterations_to(train_samples)
    if not steps:
        raise ConfigError(
            f"--train-samples ({train_samples}) is less than the first batch "
            f"({batch_size_schedule.at(0).global_batch_size})"
        )
    return steps, train_samples


def _fit(size: int, micro_batch_size: int, dp: int, option: str, decrease_if_needed: bool) -> int:
    at_once = micro_batch_size * dp
    if size % at_once == 0 and size > 0:
        return size
    lowered = size // at_once * at_once
    if decrease_if_needed and lowered:
        return lowered
    near = sorted({max(1, size // at_once) * at_once, -(-size // at_once) * at_once})
    which = f" ({size})" if option == "--global-batch-size" else f": the size {size}"
    lower = "" if decrease_if_needed else " (--decrease-batch-size-if-needed takes the lower one)"
    raise ConfigError(
        f"{option}{which} must be divisible by --micro-batch-size ({micro_batch_size}) x "
        f"data-parallel ranks ({dp}) = {at_once}; near it: {' or '.join(map(str, near))}"
        f"{lower if lowered else ''}"
    )


def _joined(phases: Sequence[BatchSizePhase]) -> list[BatchSizePhase]:
    """The phases without those that change nothing."""
    changes = [b for a, b in pairwise(phases) if a.global_batch_size != b.global_batch_size]
    return [phases[0], *changes]


def _ramp(rampup: Sequence[int], global_batch_size: int) -> list[BatchSizePhase]:
    """Megatron-LM's rule: size = start + int(consumed / (samples / steps)) x increment until
    consumed > samples, in its floating-point arithmetic."""
    option = "--rampup-batch-size"
    if len(rampup) != 3:
        raise ConfigError(f"{option} takes three numbers (start, increment, samples), got {rampup}")
    start, increment, samples = rampup
    if min(rampup) < 1:
        raise ConfigError(
            f"{option}: start, increment and samples must be at least 1, got {rampup}"
        )
    difference = global_batch_size - start
    if difference < 0 or difference % increment:
        raise ConfigError(
            f"{option}: steps of {increment} from {start} do not lead to --global-batch-size "
            f"({global_batch_size})"
        )
    num_steps = difference // increment
    phases = [BatchSizePhase(0, start)]
    for step in range(1, num_steps + 1):
        begin = _first_of_step(step, samples / num_steps, samples)
        phases.append(BatchSizePhase(begin, start + step * increment))
    # Several increments at one sample: the last one counts.
    last = {phase.begin: phase for phase in phases}
    return sorted(last.values(), key=lambda phase: phase.begin)


def _first_of_step(step: int, samples_per_step: float, samples: int) -> int:
    """The smallest number of consumed samples at which the ramp is at `step`."""
    guess = int(step * samples_per_step)
    while guess > 0 and int((guess - 1) / samples_per_step) >= step:
        guess -= 1
    while guess <= samples and int(guess / samples_per_step) < step:
        guess += 1
    return guess


def _table(text: str, seq_length: int, global_batch_size: int | None) -> list[BatchSizePhase]:
    """`0:768 250B:1536`: batch sizes by consumed tokens. In Megatron-LM's arithmetic: numbers of
    tokens are floats, and samples are rounded down."""
    option = "--step-batch-size-schedule"
    phases = []
    for entry in text.replace(",", " ").split():
        tokens, _, size = entry.partition(":")
        begin, batch = _count(tokens), _count(size)
        if begin is None or batch is None or batch < 1:
            raise ConfigError(
                f"{option}: {entry!r} is not TOKENS:SIZE, as in 0:768 250B:1536 (K, M, B, T)"
            )
        phases.append(BatchSizePhase(begin // seq_length, batch))
    phases.sort(key=lambda phase: phase.begin)
    if not phases or phases[0].begin != 0:
        raise ConfigError(f"{option} {text!r} must begin at 0 tokens, as in 0:768 250B:1536")
    for before, phase in pairwise(phases):
        if before.begin == phase.begin:
            raise ConfigError(
                f"{option} {text!r}: batches of {before.global_batch_size} and "
                f"{phase.global_batch_size} begin at the same sample ({phase.begin}); put them at "
                f"least --seq-length ({seq_length}) tokens apart"
            )
    last = phases[-1].global_batch_size
    if global_batch_size is not None and global_batch_size != last:
        raise ConfigError(
            f"{option}: its last batch size {last} must equal --global-batch-size "
            f"{global_batch_size}; leave --global-batch-size out or give the same"
        )
    return phases


def _count(text: str) -> int | None:
    """500, 1.5K, 1e9, 250B as an integer, rounded down; None for other text."""
    number = text.strip().upper()
    suffix = number[-1:] if number[-1:] in SUFFIXES else ""
    try:
        return int(float(number.removesuffix(suffix)) * SUFFIXES[suffix])
    except (ValueError, OverflowError):
        return None
