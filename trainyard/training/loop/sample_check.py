"""What a step took, held against what it was to take: the evidence behind `samples` and `rng` of
the ledger.

The order of the data and the run's seed say of every step which samples it is made of and what its
dropout draws from. The batches say which samples they are (`loader.SAMPLE_IDS`), and the generators
what they are seeded with. Each rank compares its own part of a step before any parameter is
updated; one that finds something else ends before the sums that all ranks wait for, so that no rank
updates anything. A step that was taken was therefore, on all ranks, what its digests say, and no
rank has to ask another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from trainyard.datasets.loader import SAMPLE_IDS, Batch
from trainyard.errors import DataError, TrainyardError
from trainyard.parallel.groups import ProcessGroups
from trainyard.training.loop.batch_size import BatchSize
from trainyard.training.loop.ledger import digest_samples
from trainyard.training.loop.randomness import generator_seed
from trainyard.training.loop.seeds import digest_of_seeds, step_seeds

NextSamples = Callable[[int], NDArray[np.int64]]
"""From the micro-batches of the next step to the ids of its samples, (micro-batches, dp, micro
batch size, 2), those of all ranks."""


class StepMismatchError(TrainyardError):
    """A step took other samples, or was to draw from other seeds, than its place in the run gives:
    a defect, or a fault of the machine's memory. Exit status 70."""


class SampleCheck:
    """What one pass over the micro-batches of a step took on this rank."""

    def __init__(self, step: int, num_microbatches: int) -> None:
        self.ids: list[NDArray[np.int64] | None] = []
        """(b, 2) of each micro-batch; None where it does not say."""
        self.seeds: dict[tuple[int, int], tuple[int, ...]] = {}
        """By chunk and micro-batch, what each generator held when its forward pass began."""
        self._step, self._num_microbatches = step, num_microbatches

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches, noted when they are taken; DataError where there are no more."""
        for batch in batches:
            ids = batch.get(SAMPLE_IDS)
            self.ids.append(None if ids is None else ids.numpy())
            yield batch
        raise DataError(
            f"step {self._step}: the training data ended after {len(self.ids)} of the "
            f"{self._num_microbatches} micro-batches of this rank; the loader of "
            "--dataloader-type external has to give as many as the run takes"
        )


class StepEvidence:
    """What one step is to take on all ranks, worked out when this rank's part is first compared:
    while the device computes."""

    def __init__(
        self,
        step: int,
        size: BatchSize,
        seed: int,
        groups: ProcessGroups,
        next_samples: NextSamples | None,
    ) -> None:
        """next_samples: asked once; None for data that loads itself, of which nothing is known."""
        self.samples = ""
        """Digest of the samples of all ranks, once they were compared."""
        self.rng: str | None = None
        """Digest of the seeds of all ranks, once they were compared."""
        self._step, self._size, self._seed = step, size, seed
        self._groups = groups
        self._next_samples = next_samples
        self._ids: NDArray[np.int64] | None = None

    def check(self, taken: SampleCheck) -> None:
        """Compare a pass over the step; it may be made and compared again. Raises
        StepMismatchError."""
        self.check_samples(taken)
        self._check_seeds(taken)

    def check_samples(self, taken: SampleCheck) -> None:
        """Compare only which samples were taken."""
        if self._next_samples is None:
            return
        if self._ids is None:
            self._ids = self._next_samples(self._size.num_microbatches)
        own = self._ids[:, self._groups.dp_rank]
        if not _is_same(taken.ids, own):
            raise self._mismatch(_difference(taken.ids, own))
        if not self.samples:
            self.samples = digest_samples(self._ids.reshape(-1, self._ids.shape[-1]))

    def _check_seeds(self, taken: SampleCheck) -> None:
        dp, here = self._groups.dims.dp, self._groups.coordinates
        count = self._size.num_microbatches
        seeds = step_seeds(self._seed, self._step, count * dp)
        for (chunk, index), found in taken.seeds.items():
            wanted = generator_seed(seeds[index * dp + here.dp], here.tp, here.cp, chunk)
            if any(seed != wanted for seed in found):
                raise self._mismatch(
                    f"micro-batch {index}: the generators of its dropout held {found}, and "
                    f"{wanted} is their seed"
                )
        places = {index for _, index in taken.seeds}
        if places != set(range(count)):
            raise self._mismatch(f"{len(places)} of its {count} micro-batches were computed")
        self.rng = digest_of_seeds(seeds)

    def _mismatch(self, difference: str) -> StepMismatchError:
        return StepMismatchError(
            f"step {self._step}, rank {self._groups.rank}: {difference}. The step was not taken "
            "and is in no checkpoint: the run goes on before it when it is started again. This is "
            "a defect of trainyard, of the ids that a dataset of your own gives, or of this "
            "machine's memory; report it if it comes again"
        )


def _is_same(found: list[NDArray[np.int64] | None], own: NDArray[np.int64]) -> bool:
    ids = [one for one in found if one is not None and one.shape == own.shape[1:]]
    # One comparison: arrays of a few numbers take long to call, and not to compare.
    return len(ids) == len(found) == len(own) and np.array_equal(np.stack(ids), own)


def _difference(found: list[NDArray[np.int64] | None], own: NDArray[np.int64]) -> str:
    """Where what was taken first differs from (micro-batches, micro batch size, 2) ids."""
    for index, (ids, wanted) in enumerate(zip(found, own, strict=False)):
        if ids is None:
            return f"micro-batch {index} does not say which samples it is"
        if ids.shape != wanted.shape:
            return f"micro-batch {index} has {len(ids)} samples in place of {len(wanted)}"
        rows = np.flatnonzero((ids != wanted).any(axis=1))
        if len(rows):
            row = int(rows[0])
            return (
                f"row {row} of micro-batch {index} is {_named(ids[row])}, where the order of the "
                f"data has {_named(wanted[row])}"
            )
    return f"{len(found)} micro-batches were taken in place of {len(own)}"


def _named(sample: NDArray[np.int64]) -> str:
    source, number = sample.tolist()
    return f"sample {number} of source {source}"
