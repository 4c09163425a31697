"""Which units of work the input falls into: a function of the files and their sizes, and of the
number of ranks that may make shares of their own of it.

Workers and partitions have no say in it, so what one run finished another can use."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from trainyard.artifacts import store
from trainyard.corpus.documents import split_ranges
from trainyard.corpus.formats.records import ByteRange
from trainyard.corpus.unit_sizes import LOOKING_AT_ONCE, unit_bytes_for

log = logging.getLogger(__name__)


class InputFile(NamedTuple):
    """A file of the input."""

    url: str
    size_bytes: int
    version: str = ""


@dataclass(frozen=True, slots=True)
class Unit:
    """Some neighbouring documents: a range of one file, or several small files whole."""

    name: str
    sources: tuple[ByteRange, ...]
    files: tuple[int, ...]
    """The number of each source's file in the input."""

    @property
    def size_bytes(self) -> int:
        """Input it reads."""
        return sum(source.size_bytes for source in self.sources)


def look_at(files: Sequence[str]) -> list[InputFile]:
    """The files with their sizes; warns of empty ones."""
    with ThreadPoolExecutor(LOOKING_AT_ONCE) as threads:
        found = list(threads.map(store.info, files))
    sizes = [
        InputFile(url, info.size_bytes, info.version)
        for url, info in zip(files, found, strict=True)
    ]
    for file in sizes:
        if not file.size_bytes:
            log.warning("%s is empty", file.url)
    return sizes


class Split(Protocol):
    """Cuts the bytes of a file from `start` to `end` into ranges of at most some bytes."""

    def __call__(self, url: str, end: int, unit_bytes: int, start: int = 0) -> list[ByteRange]:
        """The ranges, in order, without gap or overlap; none for no bytes."""


def plan_units(
    files: Sequence[InputFile],
    split: Split = split_ranges,
    least_bytes: int | None = None,
    world_size: int | None = None,
) -> list[Unit]:
    """The units of all files, in the order of the output. least_bytes, world_size: of
    `unit_bytes_for`."""
    total = sum(file.size_bytes for file in files)
    unit_bytes = unit_bytes_for(total, least_bytes, world_size)
    whole = (ByteRange(file.url, 0, file.size_bytes) for file in files)
    return _cut(enumerate(whole), split, unit_bytes)


def plan_pieces(
    units: Sequence[Unit], world_size: int, split: Split = split_ranges
) -> list[list[Unit]]:
    """The pieces of each unit, which ranks do apart: enough that each has work, and small enough
    that a kill costs little. Of an input that is not large, a unit is one piece."""
    total = sum(unit.size_bytes for unit in units)
    unit_bytes = unit_bytes_for(total, world_size=world_size)
    return [
        _cut(zip(unit.files, unit.sources, strict=True), split, unit_bytes)
        if unit.size_bytes > unit_bytes
        else [unit]
        for unit in units
    ]


def _cut(sources: Iterable[tuple[int, ByteRange]], split: Split, unit_bytes: int) -> list[Unit]:
    """sources: with the numbers of their files."""
    units: list[Unit] = []
    gathered: list[tuple[int, ByteRange]] = []
    room = unit_bytes
    for number, source in sources:
        size_bytes = source.size_bytes
        ranges = split(source.url, source.end, unit_bytes, source.start)
        is_small = len(ranges) == 1 and size_bytes < unit_bytes
        if gathered and ranges and not (is_small and size_bytes <= room):
            units.append(_unit(gathered))
            gathered, room = [], unit_bytes
        if is_small:
            gathered.append((number, ranges[0]))
            room -= size_bytes
            continue
        units += [_unit([(number, one)]) for one in ranges]
    return [*units, _unit(gathered)] if gathered else units


def _unit(gathered: list[tuple[int, ByteRange]]) -> Unit:
    (first, source), (last, _) = gathered[0], gathered[-1]
    name = f"{first:07d}-{last:07d}-{source.start:015d}"
    return Unit(name, tuple(r for _, r in gathered), tuple(number for number, _ in gathered))


def share_of(units: Sequence[Unit], rank: int, world_size: int) -> list[Unit]:
    """The neighbouring units that one rank does: about the same number of bytes for each."""
    total = max(sum(unit.size_bytes for unit in units), 1)
    ends = itertools.accumulate(unit.size_bytes for unit in units)
    middles = (2 * end - unit.size_bytes for unit, end in zip(units, ends, strict=True))
    owners = (min(middle * world_size // (2 * total), world_size - 1) for middle in middles)
    return [unit for unit, owner in zip(units, owners, strict=True) if owner == rank]
