"""Finds token ids outside the vocabulary before a model looks them up.

A pair of token files does not record the size of its vocabulary, so tokens are checked before any
work. Small mapped files are checked completely. For larger ones, blocks spread over the file are
checked and, with --data-cache-path, the largest id, which `stages.index` has found and saved by
content. Files in an object store are checked in a few places. Every sample is checked again when it
is gathered (`token_rows.checked_text`). A part of a file is usually enough: special tokens mostly
have the largest ids, and end every document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.corpus.indexed import IndexedDataset
from trainyard.datasets.arrays import digest_array
from trainyard.datasets.index_cache import IN_MEMORY, Indexer
from trainyard.datasets.sample_format import Sample
from trainyard.datasets.token_rows import UNSIGNED, TokenSource
from trainyard.errors import DataError

WHOLE_TOKENS = 1 << 27
"""If a run's mapped files have fewer tokens together (256 MB of 16-bit ids), all are checked: 25 ms
if they are in memory."""
BLOCK_TOKENS = 1 << 16
"""Tokens of a block that is checked in a larger file."""
NUM_BLOCKS = 32
"""Blocks, evenly spread over each file from its beginning to its end: 4 MB of 16-bit ids."""
SCAN_TOKENS = 1 << 20
"""Tokens read at once in search of the largest id."""
KEY_BLOCKS, KEY_TOKENS = 16, 1 << 12
"""Blocks, and tokens of each, that identify a file together with its index, to save its largest
id."""
NUM_SEQUENCES = 2
"""Sequences to check in a file that is not mapped: each may be a request to a remote store."""
MARGIN_TOKENS = 1 << 12
"""Tokens to check at the end of each of these."""

LARGEST = "place"
"""Name of the saved array: the place of the largest id."""


def refuse_floats(file: TokenSource) -> None:
    """Refuse a file whose tokens are not whole numbers."""
    if file.dtype.kind == "f":
        raise DataError(
            f"{file.prefix}.idx: the tokens are stored as {file.dtype}, but ids must be whole "
            "numbers; tokenize the text again"
        )


def outside(tokens: NDArray[Any], vocab_size: int) -> NDArray[np.intp]:
    """Flat places of ids that are not in [0, vocab_size)."""
    unsigned = tokens.view(UNSIGNED[tokens.itemsize])  # a negative id is a huge one
    if not tokens.size or np.maximum.reduce(unsigned, axis=None) < vocab_size:
        return np.empty(0, np.intp)
    return np.flatnonzero(unsigned.ravel() >= vocab_size)


def check_tokens(
    source: TokenSource, vocab_size: int, num_sources: int = 1, indexer: Indexer = IN_MEMORY
) -> None:
    """Check a token file. Raises DataError naming file, document, place and id.

    vocab_size: 0 if it is not known, as when indices are built in advance. num_sources: number of
    files of the run, which share the budget of tokens to check; every rank checks all. indexer: may
    know the largest id of a file that is not checked completely, or may save it for a later run."""
    dtype = source.dtype
    holds_all = dtype.kind == "u" and np.iinfo(dtype).max < vocab_size
    if dtype.kind == "f" or holds_all:  # refuse_floats refuses tokens that are floats
        return
    if not isinstance(source, IndexedDataset) or not source.is_mapped:
        if vocab_size:
            _check_sequences(source, vocab_size)
        return
    num_tokens = source.num_tokens
    is_small = num_tokens <= WHOLE_TOKENS // num_sources
    if vocab_size:
        blocks = _blocks(num_tokens, max(2, NUM_BLOCKS // num_sources), BLOCK_TOKENS)
        for begin, end in _pieces(num_tokens) if is_small else blocks:
            found = outside(source.get_flat(begin, end), vocab_size)
            if len(found):
                raise _fault_at(source, begin + int(found[0]), vocab_size)
    if is_small:
        return
    known = indexer.largest_token(_facts(source), lambda: {LARGEST: largest(source)})
    if known is not None and vocab_size:
        place = int(known[LARGEST][0])
        if len(outside(source.get_flat(place, place + 1), vocab_size)):
            raise _fault_at(source, place, vocab_size)


def _fault_at(source: IndexedDataset, place: int, vocab_size: int) -> DataError:
    """place: of the token in the whole file."""
    starts = source.sequence_offsets // source.dtype.itemsize
    sequence = int(np.searchsorted(starts, place, "right")) - 1
    token = int(source.get_flat(place, place + 1)[0])
    return fault(source, sequence, place - int(starts[sequence]), token, vocab_size)


def _blocks(num_tokens: int, num_blocks: int, size: int) -> Iterator[tuple[int, int]]:
    """Bounds of the blocks to check; one block for a whole short file."""
    if num_tokens <= num_blocks * size:
        yield 0, num_tokens
        return
    for i in range(num_blocks):
        begin = (num_tokens - size) * i // (num_blocks - 1)
        yield begin, begin + size


def _pieces(num_tokens: int) -> Iterator[tuple[int, int]]:
    """Bounds of all tokens, some at a time."""
    for begin in range(0, num_tokens, SCAN_TOKENS):
        yield begin, min(begin + SCAN_TOKENS, num_tokens)


# --- the largest id of a file -----------------------------------------------------------------


def largest(source: IndexedDataset) -> NDArray[np.int64]:
    """(1,) place of the largest id of all; a negative id counts as larger than any other."""
    unsigned = UNSIGNED[source.dtype.itemsize]
    best, place = -1, 0
    for begin, end in _pieces(source.num_tokens):
        piece = source.get_flat(begin, end).view(unsigned)
        if (top := int(np.maximum.reduce(piece))) > best:
            best, place = top, begin + int(piece.argmax())
    return np.array([place], np.int64)


def _facts(source: IndexedDataset) -> dict[str, Any]:
    """The key of the largest id: the lengths of all sequences, and tokens from all over the file.

    If two files share both, the checks of samples still find a wrong id."""
    blocks = _blocks(source.num_tokens, KEY_BLOCKS, KEY_TOKENS)
    some = np.concatenate([source.get_flat(begin, end) for begin, end in blocks])
    return {
        "function": "largest_token",
        "sequence_lengths": digest_array(source.sequence_lengths, "<i4"),
        "dtype": source.dtype.str,
        "tokens": digest_array(some, source.dtype.newbyteorder("<").str),
    }


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
    """The error for a token outside the vocabulary, at a place of a sequence. sample: text that
    names its sample, if known."""
    where = f"sequence {sequence}"
    bounds = getattr(source, "document_indices", None)  # mock data has none
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
    """Check tokens and labels of a sample that did not come from a token file."""
    for key in ("tokens", "labels"):
        values = np.ascontiguousarray(sample[key])
        found = outside(values, vocab_size)
        if len(found):
            raise DataError(
                f"{name} has {int(values.ravel()[found[0]])} among its {key} at place "
                f"{int(found[0])}, outside the vocabulary of {vocab_size} (ids 0 to "
                f"{vocab_size - 1})"
            )
