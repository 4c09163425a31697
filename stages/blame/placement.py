"""Where the samples of each step went: micro-batch, rank and row depend on the number of ranks,
which may change while a run is unfinished, and is not always known; how many samples a step has may
change as the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stages.blame.described import RunDescription
from trainyard.datasets.sampler import SamplerShape
from trainyard.datasets.serving_order import Place, Serving
from trainyard.errors import ConfigError
from trainyard.training.loop.batch_size import BatchSchedule
from trainyard.training.run.dp_history import DpSpan

log = logging.getLogger(__name__)

FLAG = "--data-parallel-size"
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps, both ends included, that were taken on one number of ranks, of equally many
    samples."""

    first_step: int
    last_step: int
    serving: Serving
    is_known: bool
    """The number of ranks is known; where it is not, `serving` has 1."""
    is_recorded: bool
    """The run tells it."""

    @property
    def tells_samples(self) -> bool:
        """True when it is known which samples a step had; in order, any number of ranks has the
        same."""
        return self.is_known or self.serving.dataloader_type == "single"


class Placement:
    """The places of the samples of a run, each by the ranks of its step."""

    def __init__(self, run: RunDescription, num_samples: int) -> None:
        self._run = run
        self._num_samples = num_samples
        self._segments = list(self._all_segments())
        self._unknown: set[int] = set()

    def segment(self, step: int) -> Segment:
        """The segment of a step; refuses a --data-parallel-size that the run contradicts."""
        found = next(s for s in self._segments if s.first_step <= step <= s.last_step)
        given, recorded = self._run.data_parallel_size, found.serving.shape.dp
        if found.is_recorded and given not in (None, recorded):
            raise ConfigError(
                f"{FLAG} {given}: steps {found.first_step} to {found.last_step} of the run of "
                f"--load were taken on {recorded} data-parallel ranks; leave it out"
            )
        return found

    def step(self, number: int) -> list[tuple[Place, int]]:
        """The samples of a step and their places."""
        serving, samples = self.segment(number).serving, self.samples(number).tolist()
        first = serving.begin(number)
        return [(self._known(serving.place(first + k)), sample) for k, sample in enumerate(samples)]

    def samples(self, number: int) -> Ints:
        """The samples of a step, in order."""
        segment = self.segment(number)
        if not segment.tells_samples:
            raise ConfigError(
                f"{FLAG} is required: on how many ranks step {number} was taken is not recorded, "
                "and with --dataloader-type cyclic the samples of a step depend on it"
            )
        return segment.serving.step(number)

    def places(self, samples: Sequence[int]) -> dict[int, list[Place]]:
        """Every place at which each sample is served, in order."""
        found: dict[int, list[Place]] = {sample: [] for sample in samples}
        wanted = np.array(samples, np.int64)
        for segment in self._telling():
            served = segment.serving.places(wanted, segment.last_step)
            for sample, places in served.items():
                found[sample] += map(self._known, places)
        return found

    def counts(self, samples: Ints) -> Ints:
        """(n,) the number of places at which each sample is served."""
        counts = np.zeros(len(samples), np.int64)
        for segment in self._telling():
            counts += segment.serving.counts(samples, segment.last_step)
        return counts

    def warn(self) -> None:
        """Say for which of the steps that were asked about the places are not known."""
        if self._unknown:
            log.warning(
                "steps %s: on how many data-parallel ranks they were taken is not recorded, so "
                "micro-batches, ranks and rows are not known; %s tells",
                *(", ".join(map(str, sorted(self._unknown))), FLAG),
            )

    def _known(self, place: Place) -> Place:
        if self.segment(place.step).is_known:
            return place
        self._unknown.add(place.step)
        return Place(place.step, None, None, None)

    def _telling(self) -> Iterator[Segment]:
        for segment in self._segments:
            if segment.tells_samples:
                yield segment
                continue
            log.warning(
                "steps %d to %d: on how many data-parallel ranks they were taken is not recorded, "
                "and with --dataloader-type cyclic their samples depend on it; they are left out, "
                "unless %s tells",
                *(segment.first_step, segment.last_step, FLAG),
            )

    def _all_segments(self) -> Iterator[Segment]:
        run, consumed = self._run, 0
        for first, last, span in _whole(run.spans, run.steps):
            ranks = run.data_parallel_size if span is None else span.data_parallel_size
            micro = run.training.micro_batch_size if span is None else span.micro_batch_size
            shape = SamplerShape(self._num_samples, micro, ranks or 1)
            for begin, end, size in _alike(run.schedule(shape.dp, micro), consumed, first, last):
                serving = Serving(
                    shape, size, run.data.dataloader_type, run.data.data_sharding, begin, consumed
                )
                yield Segment(begin, end, serving, ranks is not None, span is not None)
                consumed = serving.begin(end + 1)


def _whole(spans: Sequence[DpSpan], last_step: int) -> Iterator[tuple[int, int, DpSpan | None]]:
    """The spans, and None for the steps of the run that are in none of them."""
    step = 1
    for span in spans:
        if step < span.first_step:
            yield step, span.first_step - 1, None
        yield span.first_step, span.last_step, span
        step = span.last_step + 1
    if step <= last_step:
        yield step, last_step, None


def _alike(
    schedule: BatchSchedule, consumed: int, first: int, last: int
) -> Iterator[tuple[int, int, int]]:
    """(first step, last step, samples of each) of steps in a row that take equally many, where the
    first begins after so many samples."""
    while first <= last:
        size = schedule.at(consumed).global_batch_size
        change = next((s.begin for s in schedule.stages if s.begin > consumed), None)
        count = last - first + 1
        if change is not None:
            count = min(count, -(-(change - consumed) // size))
        yield first, first + count - 1, size
        first, consumed = first + count, consumed + count * size
