"""Documents to tokens, some neighbouring documents at a time: numpy from end to end.

Pure functions of a block and a tokenizer; knows nothing of files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainyard.corpus.formats.records import Document, DocumentColumns
from trainyard.tokenizers.base import Tokenizer

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a block under one key, as an .idx counts them."""

    ids: npt.NDArray[Any]
    """(n,) tokens of all sequences, end to end."""
    sequence_lengths: Ints
    sequences_per_document: Ints
    """0 for an empty document."""


def encode_block(tokenizer: Tokenizer, block: DocumentColumns, k: int, eod: int | None) -> Encoded:
    """The tokens of the texts under key number `k`, by Megatron's rule: empty sentences are
    dropped, and the end of a document belongs to its last sentence; an empty document has
    neither."""
    ids, bounds = tokenizer.encode_flat(block.texts[k])
    given = block.counts[k]
    counts = np.ones(len(block), np.int64) if given is None else np.asarray(given, np.int64)
    ends = np.cumsum(counts)
    lengths = np.diff(bounds)
    full = lengths > 0
    if not full.all():
        kept = np.concatenate(([0], np.cumsum(full)))
        counts, lengths = kept[ends] - kept[ends - counts], lengths[full]
    if eod is None:
        return Encoded(ids, lengths, counts)
    ended = counts > 0
    lengths[np.cumsum(counts)[ended] - 1] += 1
    return Encoded(_insert(ids, bounds[ends[ended]], eod), lengths, counts)


def _insert(ids: npt.NDArray[Any], places: Ints, token: int) -> npt.NDArray[Any]:
    """`ids` with a token before each of the ascending `places`."""
    out = np.empty(len(ids) + len(places), ids.dtype)
    own = np.zeros(len(out), np.bool_)
    own[places + np.arange(len(places))] = True
    out[own] = token
    out[~own] = ids
    return out


# --- the reference ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token on which the engine and the reference differ."""

    document: Document
    k: int
    words: str
    """Which token, and both ids."""


def sampled(block: DocumentColumns, salt: int, fraction: float) -> npt.NDArray[np.bool_]:
    """Which documents of a block belong to the sample: a function of where they lie alone (and of
    how the input falls into units, which is the same for any number of workers).

    `salt` differs by file. An integer hash (splitmix64) of the place, compared with the share."""
    with np.errstate(over="ignore"):
        x = _mixed(block.offsets.astype(np.uint64) + _mixed(np.full(len(block), salt, np.uint64)))
        x = _mixed(x + block.lines.astype(np.uint64))  # rows of a Parquet group share an offset
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53 < fraction


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def find_difference(tokenizer: Tokenizer, documents: list[Document]) -> Difference | None:
    """Encode some documents both ways; the first difference, None when there is none."""
    for document in documents:
        for k, texts in enumerate(document.values):
            ids, bounds = tokenizer.encode_flat(texts)
            for text, start, end in zip(texts, bounds, bounds[1:], strict=False):
                words = _differing(ids[start:end], tokenizer.reference_array(text))
                if words:
                    return Difference(document, k, words)
    return None


def _differing(ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> str:
    common = min(len(ours), len(theirs))
    unequal = ours[:common] != theirs[:common]
    if len(ours) == len(theirs) and not unequal.any():
        return ""
    i = int(unequal.argmax()) if unequal.any() else common
    here, there = (str(ids[i]) if i < len(ids) else "none" for ids in (ours, theirs))
    return f"token {i} is {here} by the engine and {there} by the reference"
