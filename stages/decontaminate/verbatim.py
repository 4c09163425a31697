"""Documents that pass on as the lines that they are, with keys added at the end, unread."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise, repeat, zip_longest
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from stages.runtime.document_units import UnitJob
from trainyard.collection.documents import Item, Place
from trainyard.corpus.formats.inputs import split_name
from trainyard.corpus.formats.lines import data_blocks
from trainyard.corpus.formats.records import ORIGIN

Array = npt.NDArray[Any]

MOST_DIGITS = 20
"""Of a number of 64 bits."""


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
    begins: Array
    """Where each line begins here, and where a next one would."""

    def __len__(self) -> int:
        """The number of lines."""
        return len(self.begins) - 1

    def item(self, at: int) -> Item:
        """The document of a line."""
        begin, after = self.begins[at : at + 2].tolist()
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


def _begins(data: bytes | bytearray) -> Array:
    found, at = [0], -1
    find, add = data.find, found.append
    while (at := find(b"\n", at + 1)) >= 0:
        add(at + 1)
    add(len(data) + 1)
    return np.array(found)


class Added:
    """The keys that documents of a unit get."""

    def __init__(
        self, has_origin: bool, split_name: str | None, first: int, is_compiled: bool
    ) -> None:
        """split_name: begins the value of `split_id`, which ends with the number of the document,
        from `first`; None: there is no such key. is_compiled: whether compiled code adds them,
        which takes longer to load than a small unit does."""
        self._has_origin, self._split_name, self._first = has_origin, split_name, first
        self._add = _by_machine_code if is_compiled else _by_template

    def lines(self, block: Block, begin: int, end: int) -> bytes | memoryview:
        """Some lines with their keys."""
        if begin == end:
            return b""
        begins = block.begins[begin : end + 1]
        texts, numbers, widths = [b""], [], []
        if not self._has_origin:
            texts[-1] += b',"origin":{"file":%s,"offset":' % orjson.dumps(block.file)
            texts += [b',"length":', b"}"]
            numbers += [block.offset + begins[:-1], np.diff(begins) - 1]
            widths += [1, 1]
        if self._split_name is not None:
            texts[-1] += b',"split_id":' + orjson.dumps(self._split_name)[:-1] + b"-"
            texts.append(b'-0000"')
            first = self._first + block.first
            numbers.append(np.arange(first + begin, first + end))
            widths.append(10)
        texts[-1] += b"}\n"
        return self._add(block.data, begins, Ends(texts, numbers, widths))


class Ends(NamedTuple):
    """What lines get at their ends: texts with numbers between them."""

    texts: list[bytes]
    numbers: list[Array]
    """Between two texts, those of all lines."""
    widths: list[int]
    """Digits that they have at least."""


def _by_template(data: bytes | bytearray, begins: Array, ends: Ends) -> bytes:
    """Lines with ends, for few of them."""
    view = memoryview(data)
    lines = [view[at : after - 2] for at, after in pairwise(begins.tolist())]
    if not ends.numbers:
        return b"".join(chain.from_iterable(zip(lines, repeat(ends.texts[0]), strict=False)))
    texts = (text.replace(b"%", b"%%") for text in ends.texts)
    formats = (b"%%0%dd" % width for width in ends.widths)
    template = b"".join(chain.from_iterable(zip_longest(texts, formats, fillvalue=b"")))
    columns = (column.tolist() for column in ends.numbers)
    added = map(template.__mod__, zip(*columns, strict=True))
    return b"".join(chain.from_iterable(zip(lines, added, strict=True)))


def _by_machine_code(data: bytes | bytearray, begins: Array, ends: Ends) -> memoryview:
    """The same, for many."""
    from trainyard.collection.line_kernels import add_to_lines  # LLVM takes time and memory

    count, size = len(begins) - 1, int(begins[-1] - begins[0])
    cuts = np.cumsum([0, *map(len, ends.texts)])
    out = np.empty(size + count * int(cuts[-1] + MOST_DIGITS * len(ends.widths)), np.uint8)
    numbers = np.ascontiguousarray(np.array(ends.numbers, np.int64).reshape(-1, count).T)
    given = np.frombuffer(memoryview(data).toreadonly(), np.uint8)
    texts = np.frombuffer(b"".join(ends.texts), np.uint8)
    used = add_to_lines(given, begins, texts, cuts, numbers, np.array(ends.widths, np.int64), out)
    return out.data[:used]
