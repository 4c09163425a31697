"""Where a run serves each sample: step, micro-batch, rank and row.

The last three depend on the number of ranks, which may change when a run resumes, and which is not
always recorded. The number of samples of a step may change during a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stages.blame.run_description import RunDescription
from trainyard.datasets.sampler import SamplerShape
from trainyard.datasets.serving_order import Place, Serving
from trainyard.errors import ConfigError
from trainyard.training.loop.batch_size import BatchSizeSchedule
from trainyard.training.run.dp_history import DpSpan

log = logging.getLogger(__name__)

FLAG = "--data-parallel-size"
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps with one number of ranks and one batch size; both ends are included."""

    first_step: int
    last_step: int
    serving: Serving
    is_known: bool
    """False: the number of ranks is unknown, and `serving` assumes 1."""
    is_recorded: bool
    """The run recorded the number of ranks."""

    @property
    def has_samples(self) -> bool:
        """True when the samples of a step are known. In sequential order they do not depend on the
        number of ranks."""
        return self.is_known or self.serving.dataloader_type == "single"


class SampleLocations:
    """The places at which a run serves its samples, by the layout of each step."""

    def __init__(self, run: RunDescription, num_samples: int) -> None:
        self._run = run
        self._num_samples = num_samples
        self._segments = list(self._all_segments())
        self._unknown: set[int] = set()

    def segment(self, step: int) -> Segment:
        """The segment of a step. Raises ConfigError for another --data-parallel-size than the
        run's."""
        found = next(s for s in self._segments if s.first_step <= step <= s.last_step)
        given, recorded = self._run.data_parallel_size, found.serving.shape.dp
        if found.is_recorded and given not in (None, recorded):
            raise ConfigError(
                f"{FLAG} {given}: steps {found.first_step} to {found.last_step} of the run of "
                f"--load ran on {recorded} data-parallel ranks; leave it out"
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
        if not segment.has_samples:
            raise ConfigError(
                f"{FLAG} is required: the number of ranks of step {number} is not recorded, and "
                "with --dataloader-type cyclic the samples of a step depend on it"
            )
        return segment.serving.step(number)

    def places(self, samples: Sequence[int]) -> dict[int, list[Place]]:
        """Every place that serves each sample, in order."""
        found: dict[int, list[Place]] = {sample: [] for sample in samples}
        wanted = np.array(samples, np.int64)
        for segment in self._with_samples():
            served = segment.serving.places(wanted, segment.last_step)
            for sample, places in served.items():
                found[sample] += map(self._known, places)
        return found

    def counts(self, samples: Ints) -> Ints:
        """(n,) the number of places that serve each sample."""
        counts = np.zeros(len(samples), np.int64)
        for segment in self._with_samples():
            counts += segment.serving.counts(samples, segment.last_step)
        return counts

    def warn(self) -> None:
        """Warn about the steps of the answer whose number of ranks is unknown."""
        if self._unknown:
            log.warning(
                "steps %s: their number of data-parallel ranks is not recorded, so micro-batches, "
                "ranks and rows are unknown; give %s",
                *(", ".join(map(str, sorted(self._unknown))), FLAG),
            )

    def _known(self, place: Place) -> Place:
        if self.segment(place.step).is_known:
            return place
        self._unknown.add(place.step)
        return Place(place.step, None, None, None)

    def _with_samples(self) -> Iterator[Segment]:
        for segment in self._segments:
            if segment.has_samples:
                yield segment
                continue
            log.warning(
                "left out steps %d to %d: their number of data-parallel ranks is not recorded, and "
                "with --dataloader-type cyclic their samples depend on it; give %s",
                *(segment.first_step, segment.last_step, FLAG),
            )

    def _all_segments(self) -> Iterator[Segment]:
        run, consumed = self._run, 0
        for first, last, span in _with_gaps(run.spans, run.steps):
            ranks = run.data_parallel_size if span is None else span.data_parallel_size
            micro = run.training.micro_batch_size if span is None else span.micro_batch_size
            shape = SamplerShape(self._num_samples, micro, ranks or 1)
            for begin, end, size in _equal_batches(
                run.batch_size_schedule(shape.dp, micro), consumed, first, last
            ):
                serving = Serving(
                    shape, size, run.data.dataloader_type, run.data.data_sharding, begin, consumed
                )
                yield Segment(begin, end, serving, ranks is not None, span is not None)
                consumed = serving.begin(end + 1)


def _with_gaps(spans: Sequence[DpSpan], last_step: int) -> Iterator[tuple[int, int, DpSpan | None]]:
    """The spans, and the steps between them with None."""
    step = 1
    for span in spans:
        if step < span.first_step:
            yield step, span.first_step - 1, None
        yield span.first_step, span.last_step, span
        step = span.last_step + 1
    if step <= last_step:
        yield step, last_step, None


def _equal_batches(
    batch_size_schedule: BatchSizeSchedule, consumed: int, first: int, last: int
) -> Iterator[tuple[int, int, int]]:
    """(first step, last step, samples of each) of consecutive steps with one batch size. The first
    step starts at `consumed` samples."""
    while first <= last:
        size = batch_size_schedule.at(consumed).global_batch_size
        change = next((s.begin for s in batch_size_schedule.phases if s.begin > consumed), None)
        count = last - first + 1
        if change is not None:
            count = min(count, -(-(change - consumed) // size))
        yield first, first + count - 1, size
        first, consumed = first + count, consumed + count * size
