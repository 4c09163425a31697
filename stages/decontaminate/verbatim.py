"""Documents that pass on as the lines that they are, with keys added at the end, unread."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import orjson

from stages.runtime.document_units import UnitJob
from trainyard.collection.documents import Item, Place
from trainyard.corpus.formats.inputs import split_name
from trainyard.corpus.formats.lines import Lines, line_blocks
from trainyard.corpus.formats.records import ORIGIN


class Block(NamedTuple):
    """Consecutive lines of a file."""

    file: str
    """Its short name."""
    first: int
    """Number of its first document in the unit."""
    offsets: list[int]
    lengths: list[int]
    lines: Lines

    def item(self, at: int) -> Item:
        """The document of a line."""
        line = self.lines[at]
        place = Place(self.file, self.offsets[at], len(line))
        fields = orjson.loads(line)
        fields.setdefault(ORIGIN, place.document())
        return Item(place, fields)

    def chosen(self, numbers: Sequence[int]) -> Sequence[int]:
        """Of ascending numbers of documents those that lie here, as places in `lines`."""
        begin, end = (bisect_left(numbers, n) for n in (self.first, self.first + len(self.lines)))
        return [number - self.first for number in numbers[begin:end]]


def blocks_of(job: UnitJob) -> Iterator[Block]:
    """The lines of a unit, each a document."""
    first = 0
    for source in job.unit.sources:
        compression = split_name(source.url)[1]
        for offset, lines in line_blocks(
            source, compression, job.config.documents.max_document_bytes
        ):
            lengths = np.fromiter(map(len, lines), np.int64, len(lines))
            offsets = offset + np.cumsum(lengths + 1) - (lengths + 1)
            name = job.names[source.url]
            yield Block(name, first, offsets.tolist(), lengths.tolist(), lines)
            first += len(lines)


class Added:
    """The keys that documents of a unit get."""

    def __init__(self, has_origin: bool, split_name: str | None, first: int) -> None:
        """split_name: begins the value of `split_id`, which ends with the number of the document,
        from `first`; None: there is no such key."""
        self._has_origin, self._split_name, self._first = has_origin, split_name, first

    def pieces(self, block: Block, begin: int, end: int) -> list[bytes]:
        """Some lines with their keys, in pieces."""
        lines = [bytes(line[:-1]) for line in block.lines[begin:end]]
        columns: list[Sequence[int]] = []
        template = b""
        if not self._has_origin:
            file = orjson.dumps(block.file).replace(b"%", b"%%")
            template = b',"origin":{"file":%s,"offset":%%d,"length":%%d}' % file
            columns = [block.offsets[begin:end], block.lengths[begin:end]]
        if self._split_name is not None:
            name = orjson.dumps(self._split_name)[:-1].replace(b"%", b"%%")
            template += b',"split_id":' + name + b'-%010d-0000"'
            first = self._first + block.first
            columns.append(range(first + begin, first + end))
        template += b"}\n"
        if not columns:
            return [piece for line in lines for piece in (line, template)]
        ends = map(template.__mod__, zip(*columns, strict=True))
        return list(chain.from_iterable(zip(lines, ends, strict=True)))
