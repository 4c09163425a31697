"""Which tokens make up each training sample.

Three indices over a set of documents: their order over all epochs, where each sample begins, and
the order of the samples. Pure functions of (lengths, sequence length, seed, number of samples),
equal to Megatron-LM's bit for bit; knows nothing of files or torch.

T tokens an epoch, E epochs, s sequence length, e 1 if a sample draws one token more than s (its
last label). Besides its results it keeps only a few chunks of documents in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import DataError

SEPARATE_LAST_EPOCH_BELOW = 0.80
"""Share of an epoch below which the last one is shuffled separately; otherwise its few samples
would be spread over the whole run."""

CHUNK = 1 << 14
"""Documents processed at once: their bounds then stay in the processor's cache, and numpy takes
memory for them again that it had before, which larger arrays get anew from the system."""

Documents: TypeAlias = NDArray[np.int32] | range
"""Ids into the sequence lengths; a range takes no memory until indices are built."""

MAX_INT32 = int(np.iinfo(np.int32).max)


@dataclass(frozen=True, slots=True)
class SampleIndices:
    """The three indices of a dataset of n samples."""

    document_index: NDArray[np.int32]
    """(E documents,) sequence id at each position."""
    sample_index: NDArray[Any]
    """(n + 1, 2) position in the document index and token offset at which each sample begins."""
    shuffle_index: NDArray[Any]
    """(n,) the sample served at each place."""


def build_sample_indices(
    sequence_lengths: NDArray[np.int32],
    documents: Documents,
    seq_length: int,
    seed: int,
    num_samples: int | None = None,
    extra_token: bool = True,
    drop_last_partial: bool = True,
) -> SampleIndices:
    """The indices of the samples from `documents` (ids into `sequence_lengths`).

    num_samples: the least number of samples, from as many epochs as needed; None: one epoch."""
    extra = int(extra_token)
    if isinstance(documents, range):
        documents = np.arange(documents.start, documents.stop, dtype=np.int32)
    tokens_per_epoch = count_tokens(sequence_lengths, documents)
    num_epochs = count_epochs(tokens_per_epoch, seq_length, num_samples, extra)
    apart = last_epoch_apart(tokens_per_epoch, num_epochs, seq_length, num_samples, extra)
    random = np.random.RandomState(seed)
    document_index = shuffle_documents(documents, num_epochs, apart is not None, random)
    sample_index = locate_samples(
        sequence_lengths,
        document_index,
        seq_length,
        extra,
        drop_last_partial,
        num_epochs * tokens_per_epoch,
    )
    shuffle_index = shuffle_samples(len(sample_index) - 1, apart, random)
    return SampleIndices(document_index, sample_index, shuffle_index)


def count_tokens(sequence_lengths: NDArray[np.int32], documents: Documents) -> int:
    """Tokens of the given documents, one epoch."""
    total = 0
    for start in range(0, len(documents), CHUNK):
        chosen = documents[start : start + CHUNK]
        place = slice(chosen.start, chosen.stop) if isinstance(chosen, range) else chosen
        lengths = sequence_lengths[place]
        total += int(lengths.sum(dtype=np.int64))
    return total


def count_samples(num_tokens: int, seq_length: int, extra: int, drop_last_partial: bool) -> int:
    """Number of samples in `num_tokens`; a last partial one counts unless it is dropped."""
    whole, rest = divmod(max(num_tokens - extra, 0), seq_length)
    return whole if drop_last_partial or rest == 0 else whole + 1


def count_epochs(
    tokens_per_epoch: int, seq_length: int, num_samples: int | None, extra: int
) -> int:
    """Epochs needed for `num_samples`, at least one."""
    if num_samples is None:
        return 1
    if tokens_per_epoch == 0:
        raise DataError(f"{num_samples} samples are needed, but the documents have no token")
    return max(1, -(-(num_samples * seq_length + extra) // tokens_per_epoch))


def last_epoch_apart(
    tokens_per_epoch: int, num_epochs: int, seq_length: int, num_samples: int | None, extra: int
) -> int | None:
    """Samples before the last epoch if that one is shuffled separately, else None."""
    if num_samples is None or num_epochs == 1:
        return None
    before = ((num_epochs - 1) * tokens_per_epoch - extra) // seq_length
    per_epoch = (tokens_per_epoch - extra) // seq_length
    wanted_of_last = num_samples - before
    return before if wanted_of_last < int(SEPARATE_LAST_EPOCH_BELOW * per_epoch) else None


def shuffle_documents(
    documents: NDArray[np.int32], num_epochs: int, last_apart: bool, random: np.random.RandomState
) -> NDArray[np.int32]:
    """The documents of all epochs, shuffled together; the last epoch separately if last_apart."""
    index = np.empty((num_epochs, len(documents)), np.int32)
    index[:] = documents
    blocks = [index[:-1], index[-1:]] if last_apart and num_epochs > 1 else [index]
    for block in blocks:
        random.shuffle(block.reshape(-1))  # reshape makes a view, as rows are contiguous
    return index.reshape(-1)


def locate_samples(
    sequence_lengths: NDArray[np.int32],
    document_index: NDArray[np.int32],
    seq_length: int,
    extra: int,
    drop_last_partial: bool,
    num_tokens: int | None = None,
) -> NDArray[Any]:
    """(n + 1, 2) where each sample begins; each takes s + e tokens, the next begins e tokens back.

    A bound is 1 - e tokens after the last token of the sample before it, so without the extra token
    it can be at the end of a document.

    num_tokens: of the whole document index, if it is already known."""
    if num_tokens is None:
        num_tokens = count_tokens(sequence_lengths, document_index)
    whole = count_samples(num_tokens, seq_length, extra, True)
    num_samples = count_samples(num_tokens, seq_length, extra, drop_last_partial)
    # An offset always fits: lengths are int32 in the file.
    dtype = np.int32 if len(document_index) <= MAX_INT32 else np.int64
    index = np.zeros((num_samples + 1, 2), dtype)
    halves = _halves(sequence_lengths)
    done, base = 0, 0
    for start in range(0, len(document_index), CHUNK):
        # Ids are in range, since the tokens were counted; `clip` only makes this faster.
        chosen = halves.take(document_index[start : start + CHUNK], axis=0, mode="clip")
        lengths = chosen.view(np.int32)[:, 0]
        ends = np.cumsum(lengths, dtype=np.int64)
        # Samples that end in each document or before it; sooner than a search for each sample.
        ended = (ends + (base - extra)) // seq_length
        np.clip(ended, done, whole, out=ended)
        found = int(ended[-1])
        if found > done:
            before = np.concatenate(([done], ended[:-1]))
            position = np.flatnonzero(ended > before)
            if len(position) < found - done:  # several samples end in one document
                position = np.repeat(position, (ended - before)[position])
            index[done + 1 : found + 1, 0] = position + start
            begins = ends[position] - lengths[position]
            last_tokens = np.arange(done + 1, found + 1) * seq_length + (extra - 1 - base)
            index[done + 1 : found + 1, 1] = last_tokens - begins + (1 - extra)
            done = found
        base += int(ends[-1])
    if num_samples > whole:
        last = len(document_index) - 1
        index[-1] = last, int(sequence_lengths[document_index[last]]) - extra
    return index


def _halves(lengths: NDArray[np.int32]) -> NDArray[np.uint16]:
    """(n, 2) the same memory. `take` copies all of an array that is not aligned, in each call, and
    an .idx holds its lengths from byte 34 on: no place for four bytes, but one for two."""
    return np.ascontiguousarray(lengths, np.int32).view(np.uint16).reshape(-1, 2)


def shuffle_samples(
    num_samples: int, apart: int | None, random: np.random.RandomState
) -> NDArray[Any]:
    """A permutation of the samples. apart: number of samples before a last epoch that is shuffled
    separately and stays last."""
    dtype = np.uint32 if num_samples < np.iinfo(np.uint32).max - 1 else np.int64
    index = np.arange(num_samples, dtype=dtype)
    bound = num_samples if apart is None else apart
    random.shuffle(index[:bound])
    if apart is not None:
        random.shuffle(index[bound:])
    return index
