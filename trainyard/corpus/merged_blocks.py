"""The .bin of a merge by blocks, which several machines can make: where the bytes of a block come
from, its digests, and whether its sources have the digests that are listed for them.

A block is read once. Nothing here knows who makes which block, or writes one."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from trainyard.artifacts import store
from trainyard.artifacts.backends.readahead import in_order
from trainyard.artifacts.block_digest import RangeDigests
from trainyard.artifacts.manifest import DAMAGED
from trainyard.artifacts.store import SourceFile
from trainyard.artifacts.subtree_digest import node_of
from trainyard.corpus.merge import TokenPart
from trainyard.corpus.pairs import SUMS
from trainyard.corpus.sums import DIGEST_BYTES, Sums, digest_blocks
from trainyard.errors import ArtifactError
from trainyard.machine import available_cores

BLOCK_BYTES = 4 << 20
"""A power of two, so that a block is a node of the digest's tree; a multiple of a block of .sums,
and of a page, of which no two machines may write parts."""


@dataclass(frozen=True, slots=True)
class SourceRange:
    """Bytes of one source."""

    source: SourceFile
    start: int
    end: int


class MergedTokens:
    """The bytes of pairs end to end."""

    def __init__(self, parts: Sequence[TokenPart]) -> None:
        self._sources = [part.bin for part in parts if part.bin_bytes]
        self._ends = list(accumulate(source.size_bytes for source in self._sources))

    @property
    def size_bytes(self) -> int:
        """Of the .bin."""
        return self._ends[-1] if self._ends else 0

    @property
    def num_blocks(self) -> int:
        """The last one may be shorter."""
        return -(-self.size_bytes // BLOCK_BYTES)

    def num_bytes(self, blocks: range) -> int:
        """Of these blocks, neighbours."""
        begin, end = self.bounds(blocks)
        return end - begin

    def sources(self, blocks: range) -> list[SourceFile]:
        """Those of which there is something in these blocks, in order."""
        return [part.source for part in self.ranges(*self.bounds(blocks))]

    def sources_begun(self, blocks: range) -> list[SourceFile]:
        """Those whose first byte is in these blocks."""
        return [p.source for p in self.ranges(*self.bounds(blocks)) if p.start == 0]

    def bounds(self, blocks: range) -> tuple[int, int]:
        """Where these blocks begin and end in the .bin."""
        size = self.size_bytes
        return min(blocks.start * BLOCK_BYTES, size), min(blocks.stop * BLOCK_BYTES, size)

    def ranges(self, start: int, end: int) -> Iterator[SourceRange]:
        """Where bytes `start` up to `end` come from, in order."""
        number = bisect.bisect_right(self._ends, start)
        while start < end:
            source = self._sources[number]
            base = self._ends[number] - source.size_bytes
            until = min(end, self._ends[number])
            yield SourceRange(source, start - base, until - base)
            start, number = until, number + 1


@dataclass(slots=True)
class Digests:
    """Digests of neighbouring blocks."""

    nodes: bytes = b""
    """Of the blocks, end to end (`subtree_digest`)."""
    sums: bytes = b""
    """What the .sums has of them."""
    raw: dict[str, dict[int, str]] = field(default_factory=dict)
    """Of the blocks (`block_digest`) of sources that begin here, by URL and number."""


@dataclass(frozen=True, slots=True)
class Expected:
    """How sources are checked and digested as their bytes pass by."""

    sums: Mapping[str, Sums]
    """By URL; of sources whose .sums is listed in a manifest."""
    raw: frozenset[str]
    """URLs of sources whose digests in blocks are wanted."""


def make_blocks(
    merged: MergedTokens,
    blocks: range,
    expected: Expected,
    write: Callable[[int, bytes], object],
    on_bytes: Callable[[int], object],
) -> Digests:
    """Read these blocks, neighbours, and pass each to `write` with the byte at which it begins, in
    any order, on as many threads as there are cores.

    Raises ArtifactError for a source that is not what its .sums lists, or that has changed."""
    size = merged.size_bytes
    begin, end = merged.bounds(blocks)
    passing = {p.source.url: _Passing(p, expected) for p in merged.ranges(begin, end)}
    found, at, nodes, sums = Digests(), begin, bytearray(), bytearray()

    def make(number: int) -> tuple[bytes, bytes, bytes]:
        start = number * BLOCK_BYTES
        data = _read(merged.ranges(start, min(start + BLOCK_BYTES, size)))
        write(start, data)
        return data, node_of(data, start, size), digest_blocks(data)

    cores = available_cores()
    for data, node, some in in_order(make, blocks, cores, cores + 1):
        nodes += node
        sums += some
        _pass_by(passing, merged.ranges(at, at + len(data)), data)
        at += len(data)
        on_bytes(len(data))
    for one in passing.values():
        one.finish(found.raw)
    found.nodes, found.sums = bytes(nodes), bytes(sums)
    return found


def _read(ranges: Iterable[SourceRange]) -> bytes:
    pieces = [
        store.read_range(part.source.url, part.start, part.end, part.source.version)
        for part in ranges
    ]
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class _Passing:
    """The bytes of one source that pass by."""

    def __init__(self, part: SourceRange, expected: Expected) -> None:
        source = part.source
        self._source = source
        self._sums = expected.sums.get(source.url)
        whole = (source.url, part.start, part.end, source.size_bytes)
        self._raw = RangeDigests(*whole) if source.url in expected.raw else None
        self._checked = RangeDigests(*whole, self._sums.block_bytes) if self._sums else None

    def take(self, offset: int, data: bytes) -> None:
        for digests in (self._raw, self._checked):
            if digests is not None:
                digests.pass_by(offset, data)

    def finish(self, raw: dict[str, dict[int, str]]) -> None:
        """Read the rest of blocks that end elsewhere; compare, and add to `raw`."""
        if self._raw is not None:
            raw[self._source.url] = dict(enumerate(self._raw.finish(), self._raw.first))
        if self._checked is None or self._sums is None:
            return
        for block, digest in enumerate(self._checked.finish(), self._checked.first):
            if bytes.fromhex(digest)[:DIGEST_BYTES] != self._sums.digest(block):
                low = block * self._sums.block_bytes
                raise ArtifactError(
                    f"{self._source.url}: the {self._sums.block_bytes} bytes from {low} on are not "
                    f"those that its {SUMS} lists; {DAMAGED}"
                )


def _pass_by(passing: Mapping[str, _Passing], ranges: Iterable[SourceRange], data: bytes) -> None:
    at = 0
    for part in ranges:
        piece = data[at : at + part.end - part.start]
        at += len(piece)
        passing[part.source.url].take(part.start, piece)
