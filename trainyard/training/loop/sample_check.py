"""Checks the samples and seeds that a step consumed against the expected ones. The fields `samples`
and `rng` of the ledger rest on this check.

The order of the data and the run's seed determine the samples of every step and the seeds of its
dropout. Each batch carries the ids of its samples (`loader.SAMPLE_IDS`), and each generator reports
the seed that it was given. Every rank compares its own part of a step before any parameter is
updated. A rank that finds a difference ends before the sums that all ranks wait for, so that no
rank updates anything. The digests of a step that updated parameters are therefore right, with no
communication. Rank 0, which writes the ledger, computes that of the samples of all ranks. 16,384 of
a thousand datasets take it half a millisecond, so the parts of the ranks are not combined."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from trainyard.datasets.loader import SAMPLE_IDS, Batch
from trainyard.errors import DataError, TrainyardError
from trainyard.parallel.groups import ProcessGroups
from trainyard.training.loop.batch_size import BatchSize
from trainyard.training.loop.ledger import digest_samples
from trainyard.training.loop.seeds import generator_seed, microbatch_seeds, step_digest

STEPS_AHEAD = 16
"""Steps whose ids are looked up together, if their places are in one block. Each lookup asks every
source of a blend: a thousand take 1 ms, several times as long as the samples of a step."""


class ExpectedSamples:
    """The order of the data, from some sample on, in ids."""

    def __init__(
        self,
        blocks: Iterator[NDArray[np.int64]],
        ids: Callable[[NDArray[np.int64]], NDArray[np.int64]],
    ) -> None:
        """blocks: (micro-batches, dp, micro batch size) the places of samples in the order. ids:
        from n places to the (n, 2) ids of their samples."""
        self._blocks, self._ids = blocks, ids
        self._block: NDArray[np.int64] | None = None
        """The rest of a block."""
        self._ahead: NDArray[np.int64] | None = None
        """(micro-batches, ranks, micro batch size, 2) of the next steps."""

    def next_step(self, num_microbatches: int, dp_ranks: slice) -> NDArray[np.int64]:
        """(micro-batches, ranks, micro batch size, 2) of the next step. dp_ranks: whose samples,
        the same in each call."""
        ahead = self._ahead
        while ahead is None or len(ahead) < num_microbatches:
            places = self._places(STEPS_AHEAD * num_microbatches)[:, dp_ranks]
            read = self._ids(places.ravel()).reshape(*places.shape, 2)
            ahead = np.concatenate([ahead, read]) if ahead is not None and len(ahead) else read
        self._ahead = ahead[num_microbatches:]
        return ahead[:num_microbatches]

    def _places(self, most: int) -> NDArray[np.int64]:
        """Those of the next micro-batches, of at most so many."""
        block = self._block
        while block is None or not len(block):
            block = next(self._blocks, None)
            assert block is not None, "the order of the data has ended"
        self._block = block[most:]
        return block[:most]


class StepMismatchError(TrainyardError):
    """A step consumed samples or seeds other than the expected ones: a defect, or a memory fault of
    the machine. Exit status 70."""


class ConsumedSamples:
    """Samples and seeds that one pass over the micro-batches of a step used on this rank."""

    def __init__(self, step: int, num_microbatches: int) -> None:
        self.ids: list[NDArray[np.int64] | None] = []
        """(b, 2) int64 in C order of each micro-batch; None for a batch without ids."""
        self.seeds: dict[tuple[int, int], tuple[int, ...]] = {}
        """By chunk and micro-batch: the seed of each generator at the start of the forward pass."""
        self._step, self._num_microbatches = step, num_microbatches

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Pass on batches and record them; DataError if the data ends too early."""
        for batch in batches:
            ids = batch.get(SAMPLE_IDS)
            self.ids.append(None if ids is None else ids.numpy())
            yield batch
        raise DataError(
            f"step {self._step}: the training data ended after {len(self.ids)} of the "
            f"{self._num_microbatches} micro-batches of this rank; the loader of "
            "--dataloader-type external must yield as many as the run needs"
        )


class SampleCheck:
    """The expected samples and seeds of one step. They are computed at the first comparison, while
    the device works: those of this rank, and for the ledger on rank 0 those of all."""

    def __init__(
        self,
        step: int,
        size: BatchSize,
        seed: int,
        groups: ProcessGroups,
        expected: ExpectedSamples | None,
    ) -> None:
        """expected: of it, one step is taken; None for data that loads itself, whose order is
        unknown."""
        self.samples: str | None = ""
        """Digest of the samples of all ranks, after the comparison; None on ranks other than 0."""
        self.rng: str | None = None
        """Digest of the seeds of all ranks, after the comparison."""
        self._step, self._size, self._seed = step, size, seed
        self._groups = groups
        self._expected = expected
        self._own_ids: NDArray[np.int64] | None = None
        self._digest: str | None = None

    def check(self, consumed: ConsumedSamples) -> None:
        """Compare one pass over the step. A step that runs again is compared again. Raises
        StepMismatchError."""
        self.check_samples(consumed)
        dp, here = self._groups.dims.dp, self._groups.coordinates
        count = self._size.num_microbatches
        seeds = microbatch_seeds(self._seed, self._step, range(here.dp, count * dp, dp))
        for (chunk, index), found in consumed.seeds.items():
            expected = generator_seed(seeds[index], here.tp, here.cp, chunk)
            if found.count(expected) != len(found):
                raise self._mismatch(
                    f"micro-batch {index}: the generators of its dropout were seeded with {found} "
                    f"instead of {expected}"
                )
        computed = {index for _, index in consumed.seeds}
        if computed != set(range(count)):
            raise self._mismatch(f"{len(computed)} of its {count} micro-batches were computed")
        self.rng = step_digest(self._seed, self._step, count * dp)

    def check_samples(self, consumed: ConsumedSamples) -> None:
        """Compare the samples alone."""
        if self._expected is None:
            return
        if self._own_ids is None:
            self._expect(self._expected)
        own = self._own_ids
        assert own is not None
        shape = own.shape[1:]
        ids = [one for one in consumed.ids if one is not None and one.shape == shape]
        # As bytes: numpy calls on a few numbers each would be slow.
        found = b"".join(ids)  # type: ignore[arg-type]
        if not len(ids) == len(consumed.ids) == len(own) or found != own.tobytes():
            raise self._mismatch(_difference(consumed.ids, own))
        self.samples = self._digest

    def _expect(self, expected: ExpectedSamples) -> None:
        """Take the next step of the order."""
        here, count = self._groups.dp_rank, self._size.num_microbatches
        if self._groups.rank == 0:
            ids = expected.next_step(count, slice(None))
            self._digest = digest_samples(ids.reshape(-1, 2))
            self._own_ids = ids[:, here]
        else:
            self._own_ids = expected.next_step(count, slice(here, here + 1))[:, 0]

    def _mismatch(self, difference: str) -> StepMismatchError:
        return StepMismatchError(
            f"step {self._step}, rank {self._groups.rank}: {difference}. The parameters were "
            "not updated and the step is in no checkpoint; the same command resumes before it. "
            "This is a defect of trainyard, of the ids that your own dataset returns, or of this "
            "machine's memory; report it if it happens again"
        )


def _difference(found: list[NDArray[np.int64] | None], own: NDArray[np.int64]) -> str:
    """The first difference from the expected (micro-batches, micro batch size, 2) ids."""
    for index, (ids, wanted) in enumerate(zip(found, own, strict=False)):
        if ids is None:
            return f"micro-batch {index} has no sample ids"
        if ids.shape != wanted.shape:
            return f"micro-batch {index} has {len(ids)} samples instead of {len(wanted)}"
        rows = np.flatnonzero((ids != wanted).any(axis=1))
        if len(rows):
            row = int(rows[0])
            (source, number), (expected_source, expected) = ids[row].tolist(), wanted[row].tolist()
            return (
                f"row {row} of micro-batch {index} is sample {number} of source {source}, where "
                f"the order of the data has sample {expected} of source {expected_source}"
            )
    return f"{len(found)} micro-batches were read instead of {len(own)}"
