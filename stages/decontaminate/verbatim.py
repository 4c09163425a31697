"""Documents that pass on as the lines that they are, with keys added at the end, unread."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import orjson

from stages.runtime.document_units import UnitJob
from trainyard.collection.documents import Item, Place
from trainyard.corpus.formats.inputs import split_name
from trainyard.corpus.formats.lines import data_blocks
from trainyard.corpus.formats.records import ORIGIN


class Block(NamedTuple):
    """Consecutive lines of a file."""

    file: str
    """Its short name."""
    first: int
    """Number of its first document in the unit."""
    offset: int
    """Where the first line begins in the file."""
    data: bytes | bytearray
    """The lines, without the last line feed."""
    begins: list[int]
    """Where each line begins here, and where a next one would."""

    def __len__(self) -> int:
        """The number of lines."""
        return len(self.begins) - 1

    def lengths(self, begin: int, end: int) -> Iterator[int]:
        """Bytes of some lines, without their line feeds."""
        begins = self.begins[begin : end + 1]
        return (after - at - 1 for at, after in pairwise(begins))

    def item(self, at: int) -> Item:
        """The document of a line."""
        begin, after = self.begins[at], self.begins[at + 1]
        place = Place(self.file, self.offset + begin, after - begin - 1)
        fields = orjson.loads(self.data[begin : after - 1])
        fields.setdefault(ORIGIN, place.document())
        return Item(place, fields)

    def chosen(self, numbers: Sequence[int]) -> Sequence[int]:
        """Of ascending numbers of documents those that lie here, as numbers of lines."""
        begin, end = (bisect_left(numbers, n) for n in (self.first, self.first + len(self)))
        return [number - self.first for number in numbers[begin:end]]


def blocks_of(job: UnitJob) -> Iterator[Block]:
    """The lines of a unit, each a document."""
    first = 0
    for source in job.unit.sources:
        compression = split_name(source.url)[1]
        most = job.config.documents.max_document_bytes
        for offset, data in data_blocks(source, compression, most):
            block = Block(job.names[source.url], first, offset, data, _begins(data))
            yield block
            first += len(block)


def _begins(data: bytes | bytearray) -> list[int]:
    found, at = [0], -1
    find, add = data.find, found.append
    while (at := find(b"\n", at + 1)) >= 0:
        add(at + 1)
    add(len(data) + 1)
    return found


class Added:
    """The keys that documents of a unit get."""

    def __init__(self, has_origin: bool, split_name: str | None, first: int) -> None:
        """split_name: begins the value of `split_id`, which ends with the number of the document,
        from `first`; None: there is no such key."""
        self._has_origin, self._split_name, self._first = has_origin, split_name, first

    def pieces(self, block: Block, begin: int, end: int) -> list[bytes | memoryview]:
        """Some lines with their keys, in pieces."""
        begins, data = block.begins[begin : end + 1], memoryview(block.data)
        lines = [data[at : after - 2] for at, after in pairwise(begins)]
        columns: list[Iterable[int]] = []
        template = b""
        if not self._has_origin:
            file = orjson.dumps(block.file).replace(b"%", b"%%")
            template = b',"origin":{"file":%s,"offset":%%d,"length":%%d}' % file
            columns = [map(block.offset.__add__, begins[:-1]), block.lengths(begin, end)]
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
