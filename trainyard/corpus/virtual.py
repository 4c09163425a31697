"""Virtual datasets: pairs of token files that are read end to end, as if they were merged.

A .parts names them (`artifacts.parts_list`), or they are all pairs of a folder, in the order of
their names. Finds and describes them; `virtual_reader` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_document
from trainyard.artifacts.inputs import Manifests
from trainyard.artifacts.output import PARTS
from trainyard.artifacts.parts_list import Part, PartsList, read_parts
from trainyard.artifacts.urls import basename, canonical, join
from trainyard.corpus.layout import CODES, HEADER
from trainyard.corpus.merge import TokenPart, survey_outlines
from trainyard.corpus.pairs import DOCS, PAIR, pairs_of_folder
from trainyard.errors import ArtifactError

TYPES = {dtype.name: dtype for dtype in CODES}


@dataclass(frozen=True, slots=True)
class VirtualDataset:
    """The parts of a virtual dataset, in order."""

    url: str
    """Of its .parts, or of the folder of pairs."""
    dtype: np.dtype[Any]
    is_multimodal: bool
    has_provenance: bool
    """Whether every part has a .docs sidecar."""
    parts: tuple[Part, ...]
    key: str
    """Digest of what the index depends on."""
    is_recorded: bool
    """Whether there is a .parts, with digests."""

    @property
    def token_bounds(self) -> list[int]:
        """Where each part begins in the tokens of all; at the end, their number."""
        sizes = (part.size_bytes // self.dtype.itemsize for part in self.parts)
        return list(accumulate(sizes, initial=0))

    @property
    def index_bytes(self) -> int:
        """Size of the .idx of all parts."""
        sequences = sum(part.sequences for part in self.parts)
        documents = sum(part.documents for part in self.parts)
        modes = sequences if self.is_multimodal else 0
        return HEADER.size + 12 * sequences + 8 * (documents + 1) + modes


def find_virtual(prefix: str, manifests: Manifests) -> VirtualDataset | None:
    """The virtual dataset of a prefix or folder; None for a pair, and where there is nothing.

    Raises ArtifactError for a damaged .parts, and for a folder with anything but pairs."""
    prefix = prefix.rstrip("/") or prefix
    url = prefix + PARTS
    has_pair = manifests.lists(f"{prefix}.idx")
    # A merge that replaces one by the other leaves both until it has published its manifest.
    if manifests.lists(url) and not (has_pair and manifests.record(url) is None):
        return _recorded(url, read_parts(url, manifests))
    return None if has_pair else _of_folder(prefix)


def files_of(prefix: str, manifests: Manifests | None = None) -> dict[str, str]:
    """The files that identify the tokens of a prefix or folder, by what follows it in their names:
    a pair, the .parts of a virtual dataset, or all pairs of a folder."""
    virtual = find_virtual(prefix, manifests or Manifests())
    if virtual is None:
        return {ending: prefix + ending for ending in PAIR}
    if virtual.is_recorded:
        return {PARTS: virtual.url}
    urls = (part.prefix + ending for part in virtual.parts for ending in PAIR)
    return {"/" + basename(url): url for url in urls}


def _recorded(url: str, found: PartsList) -> VirtualDataset:
    dtype = TYPES.get(found.dtype)
    if dtype is None:
        raise ArtifactError(
            f"{url}: tokens of type {found.dtype[:40]!r}; known are {', '.join(TYPES)}"
        )
    for part in found.parts:
        if part.size_bytes % dtype.itemsize:
            raise ArtifactError(
                f"{url}: {part.size_bytes} bytes of {part.prefix} are no whole tokens of {dtype}"
            )
    key = digest_document([[part.idx_digest for part in found.parts], dtype.name])
    flags = (found.is_multimodal, found.has_provenance)
    return VirtualDataset(url, dtype, *flags, found.parts, key, is_recorded=True)


def _of_folder(folder: str) -> VirtualDataset | None:
    files = [join(folder, name) for name in store.list_folder(folder)]
    if not files:
        return None
    found = survey_outlines(pairs_of_folder(folder, files))
    known = set(files)
    key = digest_document(
        [[canonical(one.idx.url), one.idx.size_bytes, one.idx.version] for one in found]
    )
    return VirtualDataset(
        folder,
        found[0].dtype,
        any(one.is_multimodal for one in found),
        all(one.prefix + DOCS in known for one in found),
        tuple(_part(one) for one in found),
        key,
        is_recorded=False,
    )


def parts_list(parts: Sequence[TokenPart], manifests: Manifests, has_provenance: bool) -> PartsList:
    """The list of pairs that `survey_outlines` found, with their digests from manifests."""
    return PartsList(
        parts[0].dtype.name,
        any(part.is_multimodal for part in parts),
        has_provenance,
        tuple(_part(part, manifests) for part in parts),
    )


def _part(found: TokenPart, manifests: Manifests | None = None) -> Part:
    urls = (found.bin.url, found.idx.url)
    digests = [manifests.file_digest(url) for url in urls] if manifests else ["", ""]
    sizes = (found.num_documents, found.num_sequences, found.bin_bytes)
    return Part(found.prefix, *sizes, *digests)
