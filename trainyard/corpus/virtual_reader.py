"""Reads a virtual dataset: one index of all parts, kept on this node, and the tokens of each part.

A part is opened when the first of its tokens is read, and only so many are open at once."""

from __future__ import annotations

import os
import resource
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from trainyard.artifacts import store
from trainyard.artifacts.by_version import one_at_a_time
from trainyard.artifacts.inputs import Manifests
from trainyard.artifacts.parts_list import Part
from trainyard.artifacts.urls import is_local
from trainyard.corpus.layout import Index, Tokens, parse_index
from trainyard.corpus.merge import merge_index, survey
from trainyard.corpus.readers import LOCAL_READERS, Reader, TokenReader, map_file, open_checked
from trainyard.corpus.remote import CacheOptions, kept_whole
from trainyard.corpus.virtual import VirtualDataset
from trainyard.errors import ArtifactError, ConfigError


def most_open(limit: int) -> int:
    """Parts of a dataset that are open at once: a quarter of the open files that a process may
    have, and of the maps. limit: of open files; `RLIM_INFINITY` for none."""
    most = 1 << 14
    return most if limit == resource.RLIM_INFINITY else max(1, min(limit // 4, most))


MAX_OPEN = most_open(resource.getrlimit(resource.RLIMIT_NOFILE)[0])

REMAKE = "restore it, or run stages.merge --virtual again"


def wrong_part(virtual: VirtualDataset, manifests: Manifests) -> str:
    """What is wrong with the size of a .bin, from the listing of its folder; empty: nothing."""
    for part in virtual.parts:
        url = part.prefix + ".bin"
        size = manifests.size(url) if manifests.lists(url) else None
        if size != part.size_bytes:
            found = "is missing" if size is None else f"is {size} bytes, not {part.size_bytes}"
            return f"{virtual.url}: its part {url} {found}; {REMAKE}"
    return ""


def check_sizes(virtual: VirtualDataset, manifests: Manifests) -> None:
    """Raise ArtifactError for a .bin that is missing or has another size."""
    fault = wrong_part(virtual, manifests)
    if fault:
        raise ArtifactError(fault)


# --- the index --------------------------------------------------------------------------------


def joined_index(virtual: VirtualDataset, options: CacheOptions) -> Index:
    """The .idx that the merged parts would have, mapped from the cache of this node, where one
    process writes it once, after a check of every entry."""
    write, size = partial(_write_index, virtual, options), virtual.index_bytes
    try:
        with one_at_a_time(f"index-{virtual.key[:32]}"):
            raw = kept_whole(virtual.url, virtual.key, size, options, write, map_file)
    except OSError as error:
        raise ConfigError(
            f"{options.folder}: the index of {virtual.url} ({size} bytes) cannot be written there "
            f"({error.strerror}); choose another folder with TRAINYARD_CACHE or "
            "--object-storage-cache-path"
        ) from error
    return parse_index(raw, f"the index of {virtual.url}")


def _write_index(virtual: VirtualDataset, options: CacheOptions, file: BinaryIO) -> None:
    manifests = Manifests()
    with tempfile.TemporaryDirectory(prefix="index-", dir=options.folder) as cache:
        found = survey([part.prefix for part in virtual.parts], Path(cache))
        for part, one in zip(virtual.parts, found, strict=True):
            url = part.prefix + ".idx"
            is_same = not part.idx_digest or manifests.file_digest(url) == part.idx_digest
            if not is_same or (one.num_documents, one.num_sequences, one.bin_bytes) != (
                part.documents,
                part.sequences,
                part.size_bytes,
            ):
                raise ArtifactError(f"{virtual.url}: its part {url} was changed since; {REMAKE}")
        merge_index(found, Path(cache), file)


# --- the tokens -------------------------------------------------------------------------------


class PartsReader:
    """The tokens of all parts, end to end."""

    flat: Tokens | None = None

    def __init__(self, virtual: VirtualDataset, kind: Reader, options: CacheOptions) -> None:
        self._virtual, self._kind, self._options = virtual, kind, options
        self._bounds = virtual.token_bounds
        is_copied = kind in ("auto", "mmap") and all(is_local(p.prefix) for p in virtual.parts)
        self.is_mapped = is_copied or kind == "fetch"
        self._open = lru_cache(maxsize=MAX_OPEN)(self._open_part)
        self._manifests: tuple[int, Manifests] | None = None

    def read(self, start: int, end: int) -> Tokens:
        """A view or a copy; a copy if the tokens are of several parts."""
        pieces = [self._open(n).read(low, high) for n, low, high in self._places(start, end)]
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, self._virtual.dtype)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """As the readers of the parts."""
        by_part: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for start, end in ranges:
            for number, low, high in self._places(start, end):
                by_part[number].append((low, high))
        for number, places in by_part.items():
            self._open(number).prefetch(places)

    def _places(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(part, first token, end) in each part of the tokens `start` up to `end`."""
        bounds = self._bounds
        number = bisect_right(bounds, start) - 1
        while start < min(end, bounds[-1]):
            stop = min(end, bounds[number + 1])
            if start < stop:
                yield number, start - bounds[number], stop - bounds[number]
            start, number = stop, number + 1

    def _open_part(self, number: int) -> TokenReader:
        virtual, part = self._virtual, self._virtual.parts[number]
        url = part.prefix + ".bin"
        info, manifests = store.info(url), self._manifests_here()
        record = manifests.record(url) if part.bin_digest else None
        if info.size_bytes != part.size_bytes or (record and record.digest != part.bin_digest):
            raise ArtifactError(f"{virtual.url}: its part {url} was changed since; {REMAKE}")
        return open_checked(
            self._kind_of(part), part.prefix, info, virtual.dtype, self._options, manifests
        )

    def _kind_of(self, part: Part) -> Reader:
        """Parts may be in several stores; a reader of local files suits only those of this host."""
        is_remote = self._kind in LOCAL_READERS and not is_local(part.prefix)
        return "auto" if is_remote else self._kind

    def _manifests_here(self) -> Manifests:
        """What this process read: a fork cannot use a lock that a thread of its parent holds."""
        if self._manifests is None or self._manifests[0] != os.getpid():
            self._manifests = os.getpid(), Manifests()
        return self._manifests[1]
