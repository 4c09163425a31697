"""How documents become chunks, and how many BERT tokens each has. Knows nothing of files.

A chunk is a row (document, start, end, BERT tokens), uint32; its text is that of the document's GPT
tokens from `start` up to `end`."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trainyard.corpus.workers import check_stop
from trainyard.tokenizers.base import Tokenizer

Ints = NDArray[np.int64]
Rows = NDArray[np.uint32]

TEXTS_AT_ONCE = 1024
"""Chunks whose texts are in memory at a time, per thread."""


class BertTokenizer(Protocol):
    """A tokenizer that counts its tokens."""

    def lengths(self, texts: list[str]) -> Ints:
        """(n,) number of tokens of each text."""


class Block(NamedTuple):
    """The chunks of some neighbouring documents, as an HDF5 file of a dataset holds them."""

    chunks_valid: Rows
    """(n, 4) chunks with BERT tokens."""
    chunks_invalid: Rows
    """(m, 4) chunks without."""
    doc_offsets: NDArray[np.uint64]
    """(d, 2) document, and the number of valid chunks up to its end, counted from the block."""


def cut_documents(lengths: Ints, chunk_length: int) -> tuple[Ints, Ints, Ints]:
    """The chunks of some documents, in order, as (document, start, end); `end` is exclusive.

    lengths: (d,) tokens of each document without its end of document. A document becomes chunks of
    `chunk_length` tokens, the last of which may be shorter; an empty one has none."""
    counts = -(-lengths // chunk_length)
    documents = np.repeat(np.arange(len(lengths)), counts)
    firsts = np.cumsum(counts) - counts
    starts = (np.arange(len(documents)) - firsts[documents]) * chunk_length
    return documents, starts, np.minimum(starts + chunk_length, lengths[documents])


def chunk_rows(
    tokens: NDArray[Any],
    bounds: Ints,
    first_document: int,
    gpt: Tokenizer,
    bert: BertTokenizer,
    chunk_length: int,
) -> Rows:
    """(n, 4) all chunks of some neighbouring documents, with and without BERT tokens.

    tokens: of these documents, end to end. bounds: (d + 1,) where each begins in `tokens`, and the
    end of the last. A trailing end of document belongs to no chunk."""
    lengths = np.diff(bounds)
    full = np.flatnonzero(lengths)
    lengths[full] -= tokens[bounds[full + 1] - 1] == gpt.eod
    documents, starts, ends = cut_documents(lengths, chunk_length)
    begins = (bounds[documents] + starts).tolist()
    stops = (bounds[documents] + ends).tolist()
    ids = tokens.tolist()
    counts = [np.zeros(0, np.int64)]
    for first in range(0, len(begins), TEXTS_AT_ONCE):
        check_stop()
        pieces = slice(first, first + TEXTS_AT_ONCE)
        texts = [
            gpt.decode(ids[begin:stop])
            for begin, stop in zip(begins[pieces], stops[pieces], strict=True)
        ]
        counts.append(bert.lengths(texts))
    columns = (documents + first_document, starts, ends, np.concatenate(counts))
    return np.stack(columns, axis=1).astype(np.uint32)


def block_of(rows: Rows, first: int, last: int) -> Block:
    """rows: all chunks of the documents from `first` up to `last`."""
    is_valid = rows[:, 3] > 0
    valid = rows[is_valid]
    counts = np.bincount(valid[:, 0].astype(np.int64) - first, minlength=last - first)
    offsets = np.stack((np.arange(first, last), np.cumsum(counts)), axis=1)
    return Block(valid, rows[~is_valid], offsets.astype(np.uint64))
