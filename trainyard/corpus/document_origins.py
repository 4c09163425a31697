"""The origins of the documents of a prefix: its sidecar, or those of the parts of a virtual
dataset, end to end."""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np

from trainyard.artifacts import store
from trainyard.artifacts.inputs import Manifests
from trainyard.corpus.pairs import DOCS
from trainyard.corpus.provenance.origins import Origin, Provenance
from trainyard.corpus.provenance.sidecar import Array
from trainyard.corpus.virtual import find_virtual

MAX_OPEN = 64
"""Sidecars of a virtual dataset that are open at once."""


class Origins(Protocol):
    """Where each document of a prefix came from."""

    @property
    def urls(self) -> Sequence[str]:
        """The sidecars, in the order of their documents."""

    @property
    def sources(self) -> Sequence[str]:
        """URLs of the input files, each once."""

    def __len__(self) -> int:
        """Documents."""

    def __getitem__(self, k: int) -> Origin:
        """Where document k came from."""

    def lines(self, documents: Array) -> Array:
        """(n,) the line of each document in its source, from 1."""

    def documents_of(self, source: str) -> Array:
        """(n,) the documents that came from a source, ascending."""


def open_origins(prefix: str, manifests: Manifests | None = None) -> Origins | None:
    """The origins of the documents of a prefix; None if no sidecar has them."""
    virtual = find_virtual(prefix, manifests or Manifests())
    if virtual is None:
        url = prefix + DOCS
        return Provenance(url) if store.exists(url) else None
    if not virtual.has_provenance:
        return None
    return JoinedOrigins([part.prefix + DOCS for part in virtual.parts])


class JoinedOrigins:
    """The origins in several sidecars, end to end; a few of them are open at once. Remote ones are
    copied to a temporary folder of this object."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = urls
        self._temporary = tempfile.TemporaryDirectory(prefix="trainyard-docs-")
        self._sidecar = lru_cache(maxsize=MAX_OPEN)(self._open)
        self._sources, sizes = [], []
        for number in range(len(urls)):
            sidecar = self._sidecar(number)
            self._sources.append(frozenset(sidecar.sources))
            sizes.append(len(sidecar))
        self._firsts = list(accumulate(sizes, initial=0))
        self.sources = sorted(frozenset[str]().union(*self._sources))

    def _open(self, number: int) -> Provenance:
        return Provenance(self.urls[number], Path(self._temporary.name))

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, k: int) -> Origin:
        if not 0 <= k < len(self):
            raise IndexError(f"document {k} of {len(self)}")
        number = bisect_right(self._firsts, k) - 1
        return self._sidecar(number)[k - self._firsts[number]]

    def lines(self, documents: Array) -> Array:
        """(n,) the line of each document in its source, from 1."""
        numbers = np.searchsorted(self._firsts, documents, "right") - 1
        lines = np.empty(len(documents), np.int64)
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            lines[mine] = self._sidecar(number).lines(documents[mine] - self._firsts[number])
        return lines

    def documents_of(self, source: str) -> Array:
        """(n,) the documents that came from a source, ascending; none for an unknown source."""
        found = [
            self._firsts[number] + self._sidecar(number).documents_of(source)
            for number, sources in enumerate(self._sources)
            if source in sources
        ]
        return np.concatenate([np.empty(0, np.int64), *found])
