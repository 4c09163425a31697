"""Which examples of a data set a training may have seen: overlaps of n tokens in a row between
their texts and the documents of token files (13 as for GPT-3, arXiv:2005.14165, appendix C).

The n-grams of the texts are hashed, the token files are read once in blocks and hashed alike, and
every hit is compared token by token. An n-gram lies within one document. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.artifacts.urls import basename
from trainyard.corpus.document_origins import Origins, open_origins
from trainyard.corpus.indexed import IndexedDataset
from trainyard.datasets.plain_text import PlainText
from trainyard.errors import DataError
from trainyard.tokenizers.base import Tokenizer

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that no token vanishes from a hash of 64 bits."""
BLOCK_TOKENS = 1 << 22
MOST_DOCUMENTS = 20
"""Documents that are named for one example; the rest are counted."""

Hashes = NDArray[np.uint64]
Ids = NDArray[np.int64]
NO_HASHES: Hashes = np.empty(0, np.uint64)


@dataclass(slots=True)
class Overlap:
    """The overlaps of one text."""

    ngrams: set[int] = field(default_factory=set)
    """Where in the text they begin, in tokens."""
    documents: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By prefix of token files."""


class Ngrams:
    """The n-grams of some texts, ready to be looked up."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer, n: int) -> None:
        plain = PlainText(tokenizer)
        self.n = n
        self.vocab_size = tokenizer.vocab_size
        ids = [np.array(plain.encode(text), np.int64) for text in texts]
        self.is_short = [len(one) < n for one in ids]
        """Of each text, whether it has no n-gram."""
        windows = [np.lib.stride_tricks.sliding_window_view(one, n) for one in ids if len(one) >= n]
        owners = [number for number, one in enumerate(ids) if len(one) >= n]
        counts = [len(one) for one in windows]
        tokens: Ids = np.concatenate(windows) if windows else np.empty((0, n), np.int64)
        of_text = np.repeat(np.array(owners, np.int64), counts)
        places = np.concatenate([np.arange(c) for c in counts]) if counts else of_text
        hashes = hashed(tokens.ravel(), n)[::n] if len(tokens) else NO_HASHES
        order = np.argsort(hashes, kind="stable")
        self._texts, self._places, ordered = of_text[order], places[order], tokens[order]
        is_new = np.ones(len(order), np.bool_)
        is_new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
        # An n-gram that comes often, such as a row of dashes, is looked up once.
        firsts = np.flatnonzero(is_new)
        self._ends = np.append(firsts, len(order))
        self._distinct, self._sorted = ordered[firsts], hashes[order][firsts]

    def hits(self, tokens: Ids) -> Iterator[tuple[int, int]]:
        """(place in `tokens`, number of the n-gram) of every n-gram that some text has too."""
        if len(tokens) < self.n or not len(self._sorted):
            return
        hashes = hashed(tokens, self.n)
        left = np.searchsorted(self._sorted, hashes, "left")
        found = self._sorted[np.minimum(left, len(self._sorted) - 1)] == hashes
        for place in np.flatnonzero(found).tolist():
            at = int(left[place])
            while at < len(self._sorted) and self._sorted[at] == hashes[place]:
                if np.array_equal(self._distinct[at], tokens[place : place + self.n]):
                    yield place, at
                at += 1

    def occurrences(self, number: int) -> list[tuple[int, int]]:
        """(text, place in the text) wherever an n-gram is; number: as `hits` gives it."""
        which = slice(int(self._ends[number]), int(self._ends[number + 1]))
        return list(zip(self._texts[which].tolist(), self._places[which].tolist(), strict=True))


def hashed(tokens: Ids, n: int) -> Hashes:
    """(len - n + 1,) polynomial hashes of 64 bits of all n-grams."""
    values = tokens.astype(np.uint64) + np.uint64(1)
    count = len(tokens) - n + 1
    found = np.zeros(count, np.uint64)
    with np.errstate(over="ignore"):
        for offset in range(n):
            found = found * MULTIPLIER + values[offset : offset + count]
        return found ^ (found >> np.uint64(29))


def overlaps(ngrams: Ngrams, prefixes: Sequence[str]) -> dict[int, Overlap]:
    """The overlaps of the texts that have any, by number. DataError for token files of another
    vocabulary."""
    documents: dict[int, set[tuple[str, int]]] = defaultdict(set)  # by n-gram
    for prefix in prefixes:
        corpus = IndexedDataset(prefix)
        starts = corpus.document_places(np.arange(corpus.num_documents + 1))
        total = int(starts[-1]) if len(starts) else 0
        for begin in range(0, total, BLOCK_TOKENS):
            end = min(begin + BLOCK_TOKENS + ngrams.n - 1, total)
            tokens = corpus.get_flat(begin, end).astype(np.int64)
            _check(prefix, tokens, ngrams.vocab_size)
            for place, number in ngrams.hits(tokens):
                document = int(np.searchsorted(starts, begin + place, "right")) - 1
                if begin + place + ngrams.n > starts[document + 1]:
                    continue  # it reaches into the next document
                documents[number].add((prefix, document))
    found: dict[int, Overlap] = defaultdict(Overlap)
    for number, where in documents.items():
        occurrences = ngrams.occurrences(number)
        for text, at in occurrences:
            found[text].ngrams.add(at)
        for text in {text for text, _ in occurrences}:
            for prefix, document in where:
                found[text].documents[prefix].add(document)
    return dict(found)


def _check(prefix: str, tokens: Ids, vocab_size: int) -> None:
    largest = int(tokens.max(initial=0))
    if largest >= vocab_size:
        raise DataError(
            f"--contamination-corpus {prefix} has token {largest}, and the checkpoint's tokenizer "
            f"has {vocab_size} tokens; name token files that were made with it"
        )


def summarize(ngrams: Ngrams, found: dict[int, Overlap]) -> dict[str, Any]:
    """What the passport says. `num_short` texts have no n-gram, so nothing is known of them."""
    return {
        "ngram": ngrams.n,
        "num_examples": len(ngrams.is_short),
        "num_short": sum(ngrams.is_short),
        "num_contaminated": len(found),
    }


def named_documents(found: dict[int, Overlap]) -> Iterator[dict[str, Any]]:
    """For each text with overlaps, their number and the documents, with their sources."""
    prefixes = {prefix for overlap in found.values() for prefix in overlap.documents}
    opened = {prefix: open_origins(prefix) for prefix in prefixes}
    sidecars = {prefix: sidecar for prefix, sidecar in opened.items() if sidecar is not None}
    for number, overlap in sorted(found.items()):
        places = [(p, d) for p, docs in sorted(overlap.documents.items()) for d in sorted(docs)]
        yield {
            "example": number,
            "num_ngrams": len(overlap.ngrams),
            "num_documents": len(places),
            "documents": [
                _named(prefix, document, sidecars.get(prefix))
                for prefix, document in places[:MOST_DOCUMENTS]
            ],
        }


def _named(prefix: str, document: int, sidecar: Origins | None) -> dict[str, Any]:
    named: dict[str, Any] = {"tokens": basename(prefix), "document": document}
    if sidecar is None or document >= len(sidecar):
        return named
    origin = sidecar[document]
    named |= {"source": origin.source, "line": origin.line}
    return named if origin.id is None else named | {"id": origin.id}
