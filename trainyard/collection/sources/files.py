"""Which files a source reads, and the units that they fall into: functions of their names and sizes
and, if given, of the indices of multistream dumps."""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import closing

from trainyard.artifacts import store
from trainyard.corpus.formats.compression import CODECS, BrokenError, contents
from trainyard.corpus.formats.inputs import is_aside
from trainyard.corpus.formats.records import ByteRange
from trainyard.errors import ConfigError, DataError

log = logging.getLogger(__name__)

ENDINGS = {
    "wikipedia": (".xml",),
    "warc": (".warc", ".wet"),
    "html": (".html", ".htm", ".xhtml"),
    "fetch": (".txt", ".jsonl"),
}
"""Of the files of a source, before that of a compression."""

SEEKABLE = {"wikipedia": ("", ".bz2"), "warc": (".gz",), "fetch": ("",)}
"""Compressions in which readers can begin in the middle of a file; "" is none."""


def compression_of(url: str) -> str:
    """The ending of a compression, such as `.bz2`; empty for none."""
    name = store.basename(url)
    return next((ending for ending in CODECS if name.endswith(ending)), "")


def source_files(source: str, urls: Sequence[str], files: Sequence[str]) -> tuple[str, ...]:
    """The files to read, in order. Others in a folder, such as the pictures of a page, are passed
    over; ConfigError for one that was named itself, and if none is left.

    urls: as given on the command line. files: the files that they name."""
    asked = {url.rstrip("/") for url in urls}
    kept, passed = [], []
    for file in files:
        name = store.basename(file).removesuffix(compression_of(file))
        if name.lower().endswith(ENDINGS[source]) and not is_aside(file, asked):
            kept.append(file)
        elif file in asked:
            raise ConfigError(
                f"--input: {file} must end in one of {', '.join(ENDINGS[source])} for --source "
                f"{source}, with {', '.join(CODECS)} after that or without; rename it or leave it "
                "out"
            )
        else:
            passed.append(file)
    if not kept:
        raise ConfigError(
            f"--input: of {len(files)} files, none ends in one of {', '.join(ENDINGS[source])}, "
            f"as those of --source {source} do"
        )
    if passed:
        log.info("--input: passed over %d other files, such as %s", len(passed), passed[0])
    return tuple(kept)


class SourceSplitter:
    """Cuts files into ranges. offsets: by file, where the streams of a multistream dump begin,
    ascending; a cut then is at one of them."""

    def __init__(self, source: str, offsets: Mapping[str, Sequence[int]]) -> None:
        self._source, self._offsets = source, offsets

    def __call__(self, url: str, end: int, unit_bytes: int, start: int = 0) -> list[ByteRange]:
        """Ranges of nearly equal size, without gap or overlap; the whole file where its format has
        no place to begin in the middle."""
        if start == end:
            return []
        bounds = [start, end]
        if compression_of(url) in SEEKABLE.get(self._source, ()):
            size_bytes = end - start
            count = -(-size_bytes // unit_bytes)
            bounds = [start + size_bytes * i // count for i in range(count + 1)]
        if starts := self._offsets.get(url):
            if starts[-1] >= end == store.info(url).size_bytes:
                raise DataError(
                    f"{url}: its index has a stream at byte {starts[-1]}, but it has {end} "
                    "bytes; give the index of this file"
                )
            inner = (bisect_left(starts, bound) for bound in bounds[1:-1])
            moved = {starts[place] for place in inner if place < len(starts)}
            bounds = [start, *sorted(one for one in moved if start < one < end), end]
        return [ByteRange(url, a, b) for a, b in itertools.pairwise(bounds)]


def read_index(url: str) -> tuple[list[int], int]:
    """The offsets of the streams in the index of a multistream dump, and its number of pages.

    Its lines are `offset:page id:title`, in the order of the dump."""
    offsets: list[int] = []
    num_pages, rest = 0, b""
    try:
        with closing(contents(url, compression_of(url))) as found:
            for piece in found:
                lines = (rest + piece).split(b"\n")
                rest = lines.pop()
                num_pages += len(lines)
                for line in lines:
                    _add(offsets, line, url)
    except BrokenError as error:
        raise DataError(f"{url}: {error}; fetch the file again") from error
    if rest:
        num_pages += 1
        _add(offsets, rest, url)
    return offsets, num_pages


def _add(offsets: list[int], line: bytes, url: str) -> None:
    offset, _, _ = line.partition(b":")
    last = offsets[-1] if offsets else -1
    if not offset.isdigit() or len(offset) > 19 or int(offset) < last:
        shown = line[:60].decode("utf-8", "replace")
        raise DataError(
            f"{url}: {shown!r} is no line of an index, which are offset:page id:title, the offsets "
            "ascending; give the -index.txt.bz2 of the dump"
        )
    if int(offset) > last:
        offsets.append(int(offset))
