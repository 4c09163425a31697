"""Token ids that the vocabulary does not have, found before a GPU is asked to look them up.

A pair of token files does not say how large its vocabulary was, so tokens are looked at: a part of
each file when it is opened, spread over it, which finds files of another tokenizer in milliseconds
before any work; and every sample when it is gathered (`gather.checked_text`), which finds the rest.
An id of special tokens, the likeliest to be too large, ends every document, so that a part shows
what the whole would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.corpus.indexed import IndexedDataset
from trainyard.datasets.form import Sample
from trainyard.datasets.gather import UNSIGNED, TokenSource
from trainyard.errors import DataError

BLOCK_TOKENS = 1 << 16
"""Looked at in one place."""
NUM_BLOCKS = 32
"""Places of the mapped files of a run, evenly spread over each, its beginning and end among them:
4 MB of 16-bit ids."""
NUM_SEQUENCES = 2
"""Sequences of a file that is not mapped: each may be a question to a far store."""
MARGIN_TOKENS = 1 << 12
"""Looked at of each of these, at its end."""


def outside(tokens: NDArray[Any], vocab_size: int) -> NDArray[np.intp]:
    """Flat places of ids that are not in [0, vocab_size)."""
    unsigned = tokens.view(UNSIGNED[tokens.itemsize])  # a negative id is a huge one
    if not tokens.size or np.maximum.reduce(unsigned, axis=None) < vocab_size:
        return np.empty(0, np.intp)
    return np.flatnonzero(unsigned.ravel() >= vocab_size)


def check_tokens(source: TokenSource, vocab_size: int, num_sources: int = 1) -> None:
    """Look at a part of a token file. Raises DataError naming file, document, place and id.

    vocab_size: 0 where it is not known, as when indices are made ahead. num_sources: files of the
    run, which share the number of places: every rank looks by itself."""
    dtype = source.dtype
    holds_none = dtype.kind == "f" or (dtype.kind == "u" and np.iinfo(dtype).max < vocab_size)
    if not vocab_size or holds_none:  # tokens that are no whole numbers are refused elsewhere
        return
    tokens = source.tokens if isinstance(source, IndexedDataset) else None
    if tokens is None:
        _check_sequences(source, vocab_size)
        return
    for begin, end in _blocks(len(tokens), max(2, NUM_BLOCKS // num_sources)):
        found = outside(tokens[begin:end], vocab_size)
        if len(found):
            place = begin + int(found[0])
            assert isinstance(source, IndexedDataset)
            starts = source.sequence_offsets // dtype.itemsize
            sequence = int(np.searchsorted(starts, place, "right")) - 1
            raise fault(
                source, sequence, place - int(starts[sequence]), int(tokens[place]), vocab_size
            )


def _blocks(num_tokens: int, num_blocks: int) -> Iterator[tuple[int, int]]:
    """Bounds of what is looked at; everything, of a short file."""
    if num_tokens <= num_blocks * BLOCK_TOKENS:
        yield 0, num_tokens
        return
    for i in range(num_blocks):
        begin = (num_tokens - BLOCK_TOKENS) * i // (num_blocks - 1)
        yield begin, begin + BLOCK_TOKENS


def _check_sequences(source: TokenSource, vocab_size: int) -> None:
    lengths = source.sequence_lengths
    chosen = sorted(set(np.linspace(0, len(source) - 1, NUM_SEQUENCES).astype(int).tolist()))
    for sequence in chosen if len(source) else ():
        begin = max(0, int(lengths[sequence]) - MARGIN_TOKENS)
        tokens = source.get(sequence, begin, int(lengths[sequence]) - begin)
        found = outside(tokens, vocab_size)
        if len(found):
            token = int(tokens[found[0]])
            raise fault(source, sequence, begin + int(found[0]), token, vocab_size)


def fault(
    source: TokenSource, sequence: int, place: int, token: int, vocab_size: int, sample: str = ""
) -> DataError:
    """What to say of one such token, at a place of a sequence. sample: of which sample, where one
    is known."""
    where = f"sequence {sequence}"
    bounds = getattr(source, "document_indices", None)  # what only stands in for a file has none
    if bounds is not None:
        document = int(np.searchsorted(bounds, sequence, "right")) - 1
        place += int(source.sequence_lengths[int(bounds[document]) : sequence].sum())
        where = f"document {document}"
    return DataError(
        f"{source.prefix}: token {token} in {where} at place {place}{sample} is outside the "
        f"vocabulary of {vocab_size} (ids 0 to {vocab_size - 1}); were these files made with "
        "another tokenizer? Give theirs (--tokenizer-type, --tokenizer-model, --vocab-size), or "
        "tokenize again"
    )


def check_sample(sample: Sample, vocab_size: int, name: str) -> None:
    """Look at tokens and labels of a sample that did not come from a token file."""
    for key in ("tokens", "labels"):
        values = np.ascontiguousarray(sample[key])
        found = outside(values, vocab_size)
        if len(found):
            raise DataError(
                f"{name} has {int(values.ravel()[found[0]])} among its {key} at place "
                f"{int(found[0])}, outside the vocabulary of {vocab_size} (ids 0 to "
                f"{vocab_size - 1})"
            )
