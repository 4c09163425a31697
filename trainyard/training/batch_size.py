"""How many samples a step takes, at each point of a run. Pure arithmetic.

Constant, ramped up, or by a table over tokens; always a function of the samples consumed so far, so
that a resumed run goes on as it would have. What of it depends on the number of ranks: a batch is
made of whole micro-batches of every data-parallel rank."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from trainyard.errors import ConfigError

SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
"""Of numbers of tokens."""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The batch of a step: global = micro x dp x num_microbatches."""

    global_batch_size: int
    micro_batch_size: int
    dp: int

    @property
    def num_microbatches(self) -> int:
        """Micro-batches that each rank works through in a step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp)


@dataclass(frozen=True, slots=True)
class Stage:
    """From so many consumed samples on, steps are of this size."""

    begin: int
    global_batch_size: int


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """The batch of every step of a run."""

    stages: tuple[Stage, ...]
    """The first begins at 0; each after the one before."""
    micro_batch_size: int
    dp: int

    @property
    def is_constant(self) -> bool:
        """Whether all steps are alike."""
        return len(self.stages) == 1

    @property
    def final(self) -> BatchSize:
        """The last size, which validation takes and numbers of iterations count in."""
        return self._size(self.stages[-1])

    def at(self, consumed: int) -> BatchSize:
        """The batch of the step that is taken after so many samples."""
        return self._size(self._stage(consumed))

    def iterations_to(self, samples: int) -> int:
        """Whole steps that a run of so many samples has; a last part of a batch is left out."""
        return self._walk(samples=samples)[0]

    def samples_after(self, iterations: int) -> int:
        """Samples that so many steps from the beginning consume."""
        return self._walk(iterations=iterations)[1]

    def _walk(self, samples: int | None = None, iterations: int | None = None) -> tuple[int, int]:
        """(steps, samples) when the next step would exceed a bound; stage by stage, not step by
        step."""
        done = consumed = 0
        ends: Sequence[int | None] = [stage.begin for stage in self.stages[1:]] + [None]
        for stage, end in zip(self.stages, ends, strict=True):
            size = stage.global_batch_size
            bounds = [] if end is None else [max(0, -(-(end - consumed) // size))]
            if samples is not None:
                bounds.append(max(0, (samples - consumed) // size))
            if iterations is not None:
                bounds.append(iterations - done)
            steps = min(bounds)
            done, consumed = done + steps, consumed + steps * size
            if end is not None and consumed < end:
                break
        return done, consumed

    def _stage(self, consumed: int) -> Stage:
        return self.stages[bisect_right([stage.begin for stage in self.stages], consumed) - 1]

    def _size(self, stage: Stage) -> BatchSize:
        return BatchSize(stage.global_batch_size, self.micro_batch_size, self.dp)


# --- from options -----------------------------------------------------------------------------


def build_batch_schedule(
    *,
    global_batch_size: int | None,
    micro_batch_size: int,
    dp: int,
    seq_length: int = 1,
    rampup_batch_size: Sequence[int] = (),
    step_batch_size_schedule: str | None = None,
    decrease_if_needed: bool = False,
) -> BatchSchedule:
    """The schedule that the options ask for; ConfigError where micro-batches do not fill a batch.

    rampup_batch_size: start, increment, samples. step_batch_size_schedule: `tokens:size ...`.
    decrease_if_needed: a size that micro-batches do not fill is lowered to one that they do."""
    if rampup_batch_size and step_batch_size_schedule is not None:
        raise ConfigError("give --rampup-batch-size or --step-batch-size-schedule, not both")
    at_once = micro_batch_size * dp
    if step_batch_size_schedule is not None:
        option = "--step-batch-size-schedule"
        stages = _table(step_batch_size_schedule, seq_length, global_batch_size)
    elif rampup_batch_size:
        option = "--rampup-batch-size"
        stages = _ramp(
            rampup_batch_size, at_once if global_batch_size is None else global_batch_size
        )
    else:
        option = "--global-batch-size"
        stages = [Stage(0, at_once if global_batch_size is None else global_batch_size)]
    fitted = [
        Stage(s.begin, _fit(s.global_batch_size, micro_batch_size, dp, option, decrease_if_needed))
        for s in stages
    ]
    return BatchSchedule(tuple(_joined(fitted)), micro_batch_size, dp)


def constant_batch_size(global_batch_size: int | None, micro_batch_size: int, dp: int) -> BatchSize:
    """The batch size of every step; ConfigError when micro-batches do not fill it evenly."""
    schedule = build_batch_schedule(
        global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, dp=dp
    )
    return schedule.final


def run_length(
    schedule: BatchSchedule, train_iters: int | None, train_samples: int | None
) -> tuple[int, int]:
    """(steps, samples) of a run that is measured in one of them."""
    if (train_iters is None) == (train_samples is None):
        raise ConfigError("give --train-iters or --train-samples, one of them")
    if train_iters is not None:
        samples = schedule.samples_after(train_iters)
        if not schedule.is_constant:
            raise ConfigError(
                f"a batch size that changes needs --train-samples, as iterations differ: "
                f"--train-iters {train_iters} would be --train-samples {samples} (the lengths of "
                "the learning rate's schedule are then in samples, too)"
            )
        return train_iters, samples
    assert train_samples is not None
    steps = schedule.iterations_to(train_samples)
    if not steps:
        raise ConfigError(
            f"--train-samples ({train_samples}) is less than the first batch "
            f"({schedule.at(0).global_batch_size})"
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


def _joined(stages: Sequence[Stage]) -> list[Stage]:
    """Without stages that change nothing."""
    changes = [b for a, b in pairwise(stages) if a.global_batch_size != b.global_batch_size]
    return [stages[0], *changes]


def _ramp(rampup: Sequence[int], global_batch_size: int) -> list[Stage]:
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
    stages = [Stage(0, start)]
    for step in range(1, num_steps + 1):
        begin = _first_of_step(step, samples / num_steps, samples)
        stages.append(Stage(begin, start + step * increment))
    # Several steps in one sample: the last of them counts.
    last = {stage.begin: stage for stage in stages}
    return sorted(last.values(), key=lambda stage: stage.begin)


def _first_of_step(step: int, samples_per_step: float, samples: int) -> int:
    """The least number of consumed samples at which the ramp is at `step`."""
    guess = int(step * samples_per_step)
    while guess > 0 and int((guess - 1) / samples_per_step) >= step:
        guess -= 1
    while guess <= samples and int(guess / samples_per_step) < step:
        guess += 1
    return guess


def _table(text: str, seq_length: int, global_batch_size: int | None) -> list[Stage]:
    """`0:768 250B:1536`: from so many consumed tokens on, steps of this size."""
    option = "--step-batch-size-schedule"
    stages = []
    for entry in text.replace(",", " ").split():
        tokens, colon, size = entry.partition(":")
        if not colon or not size.isdigit() or int(size) < 1:
            raise ConfigError(
                f"{option}: {entry!r} is not TOKENS:SIZE, as in 0:768 250B:1536 (K, M, B, T)"
            )
        stages.append(Stage(-(-_tokens(tokens, entry) // seq_length), int(size)))
    if not stages or stages[0].begin != 0:
        raise ConfigError(f"{option} {text!r} must begin at 0 tokens, as in 0:768 250B:1536")
    if any(a.begin >= b.begin for a, b in pairwise(stages)):
        raise ConfigError(f"{option} {text!r}: the numbers of tokens must grow")
    last = stages[-1].global_batch_size
    if global_batch_size is not None and global_batch_size != last:
        raise ConfigError(
            f"{option} ends at a batch of {last}, and --global-batch-size is {global_batch_size}; "
            "leave that out or give the same"
        )
    return stages


def _tokens(text: str, entry: str) -> int:
    match = re.fullmatch(r"(\d+)(?:\.(\d+))?([KMBT]?)", text.upper())
    if match is None:
        raise ConfigError(
            f"--step-batch-size-schedule: {entry!r} begins with no number of tokens, such as 0, "
            "500M, 1.5T"
        )
    whole, fraction, suffix = match.groups(default="")
    numerator, denominator = int(whole + fraction) * SUFFIXES[suffix], 10 ** len(str(fraction))
    tokens: int = -(-numerator // denominator)
    return tokens
