"""The plan of a step's files: which file holds which slice of which tensor.

A tensor has a global name, shape and type; files hold pieces of it. `Slice` describes a piece
before it is written, `checkpoint.index` afterwards. Pure: from sizes and from the ranks that hold
each slice."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from trainyard.checkpoint.index import TensorEntry, TensorPiece
from trainyard.checkpoint.safetensors.blocks import Digests
from trainyard.checkpoint.safetensors.header import TensorSpec

KINDS = ("model", "optimizer", "fp8", "rng")
"""First part of a tensor's global name, and of the name of its file."""

SHARD_SIZE_BYTES = 4 * 2**30
"""Maximum size of a planned file; a larger tensor is cut along its first dim."""


SHARED_FILE_BYTES = 2**30
"""Maximum size of a file that several ranks of a host share. Files are few where it matters, with
many ranks, as each then has little; larger ones are faster written by several ranks."""


def kind_of(name: str) -> str:
    """The kind of a tensor, from its global name."""
    kind = name.partition(".")[0]
    assert kind in KINDS, f"{name!r} does not begin with one of {KINDS} and a dot"
    return kind


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of a global tensor, to be written as one tensor of a file."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def spec(self) -> TensorSpec:
        """Type and shape in the file."""
        return TensorSpec(self.dtype, self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the values."""
        return self.spec.size_bytes

    @property
    def key(self) -> str:
        """Name in the file: the global name, then `@` and the offset unless it is the whole."""
        if self.shape == self.global_shape:
            return self.name
        return f"{self.name}@{','.join(map(str, self.offset))}"


def split_large(item: Slice, limit_bytes: int = SHARD_SIZE_BYTES) -> list[Slice]:
    """Cut a slice along its first dim into parts of at most `limit_bytes`; a row is never cut."""
    if item.size_bytes <= limit_bytes or not item.shape or item.shape[0] < 2:
        return [item]
    row_bytes = item.size_bytes // item.shape[0]
    num_parts = math.ceil(item.shape[0] / max(1, limit_bytes // row_bytes))
    bounds = [item.shape[0] * i // num_parts for i in range(num_parts + 1)]
    return [
        Slice(
            item.name,
            item.dtype,
            item.global_shape,
            (item.offset[0] + begin, *item.offset[1:]),
            (end - begin, *item.shape[1:]),
        )
        for begin, end in pairwise(bounds)
    ]


def assign(held: Sequence[Iterable[Slice]]) -> list[list[Slice]]:
    """Assign each slice to one of the writers that hold it, and balance the bytes.

    The largest slice goes first, to its least loaded holder. Each slice is written once."""
    holders: dict[Slice, list[int]] = defaultdict(list)
    for writer, slices in enumerate(held):
        for item in slices:
            holders[item].append(writer)
    loads = [0] * len(held)
    assigned: list[list[Slice]] = [[] for _ in held]
    for item in sorted(holders, key=lambda s: (-s.size_bytes, s.name, s.offset)):
        writer = min(holders[item], key=lambda w: (loads[w], w))
        loads[writer] += item.size_bytes
        assigned[writer].append(item)
    return [sorted(items, key=lambda s: (s.name, s.offset)) for items in assigned]


def pack(items: Sequence[Slice], limit_bytes: int = SHARD_SIZE_BYTES) -> list[list[Slice]]:
    """Spread the slices of one writer over as few files as `limit_bytes` allows, balanced."""
    total = sum(item.size_bytes for item in items)
    for num_files in range(max(1, math.ceil(total / limit_bytes)), len(items)):
        bins = _spread(items, num_files)
        if max(sum(item.size_bytes for item in held) for held in bins) <= limit_bytes:
            return bins
    return _spread(items, len(items))


def _spread(items: Sequence[Slice], num_bins: int) -> list[list[Slice]]:
    bins: list[list[Slice]] = [[] for _ in range(num_bins)]
    loads = [(0, index) for index in range(num_bins)]
    for item in sorted(items, key=lambda s: (-s.size_bytes, s.name, s.offset)):
        load, index = heapq.heappop(loads)
        bins[index].append(item)
        heapq.heappush(loads, (load + item.size_bytes, index))
    return [sorted(held, key=lambda s: (s.name, s.offset)) for held in bins if held]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file that one writer will make."""

    name: str
    writer: int
    slices: tuple[Slice, ...]
    holders: tuple[int, ...] = ()
    """The rank that has each slice and hands it to the writer; empty if the writer has all."""

    def held_by(self, rank: int) -> list[Slice]:
        """The slices that a rank writes or hands over."""
        if not self.holders:
            return list(self.slices) if self.writer == rank else []
        return [
            item for item, holder in zip(self.slices, self.holders, strict=True) if holder == rank
        ]


def share_files(
    sizes: Sequence[Sequence[int]], places: Sequence[int], limit_bytes: int = SHARED_FILE_BYTES
) -> list[int]:
    """For each rank, the rank that writes its slices: in each place the first ranks together, while
    no file gets larger than `limit_bytes`, then the next ones.

    sizes: of each rank, the bytes that it has of each kind."""
    writers: list[int] = []
    filled: dict[int, tuple[int, Sequence[int]]] = {}
    for rank, (own, place) in enumerate(zip(sizes, places, strict=True)):
        writer, so_far = filled.get(place, (rank, [0] * len(own)))
        together = [a + b for a, b in zip(so_far, own, strict=True)]
        if writer != rank and max(together) > limit_bytes:
            writer, together = rank, list(own)
        filled[place] = writer, together
        writers.append(writer)
    return writers


def plan_files(
    kind: str,
    held: Sequence[Iterable[Slice]],
    limit_bytes: int = SHARD_SIZE_BYTES,
) -> list[PlannedFile]:
    """The files `KIND-0000k-of-0000N.safetensors` for the slices of each rank, in their order."""
    return files_of(kind, assign(held), range(len(held)), limit_bytes)


def files_of(
    kind: str,
    assigned: Sequence[Sequence[Slice]],
    writers: Sequence[int],
    limit_bytes: int = SHARD_SIZE_BYTES,
) -> list[PlannedFile]:
    """As `plan_files`, for slices that are assigned to ranks. writers: of each rank, the rank that
    writes its slices."""
    together: dict[int, list[Slice]] = {}
    holders: dict[Slice, int] = {}
    for rank, items in enumerate(assigned):
        together.setdefault(writers[rank], []).extend(items)
        holders.update((item, rank) for item in items if writers[rank] != rank)
    groups = [
        (writer, slices)
        for writer, items in together.items()
        for slices in pack(items, limit_bytes)
    ]
    return [
        replace(file, holders=tuple(holders.get(item, file.writer) for item in file.slices))
        if any(item in holders for item in file.slices)
        else file
        for file in _named(kind, groups)
    ]


def plan_shards(kind: str, slices: Iterable[Slice], num_shards: int) -> list[PlannedFile]:
    """`num_shards` balanced files, or one per slice if there are fewer slices.

    As `plan_files` for `num_shards` writers that hold all slices, without a look at every writer
    for each slice."""
    return _named(kind, list(enumerate(_spread(list(slices), num_shards))))


def _named(kind: str, groups: Sequence[tuple[int, Sequence[Slice]]]) -> list[PlannedFile]:
    names = [f"{kind}-{k:05d}-of-{len(groups):05d}.safetensors" for k in range(1, len(groups) + 1)]
    return [PlannedFile(name, w, tuple(s)) for name, (w, s) in zip(names, groups, strict=True)]


def entries_of(
    files: Iterable[PlannedFile], written: Mapping[str, Digests] | None = None
) -> dict[str, TensorEntry]:
    """The index entries of planned files. written: digests of the files that exist, by name."""
    pieces: dict[str, list[TensorPiece]] = defaultdict(list)
    described: dict[str, TensorSpec] = {}
    for file in files:
        for item in file.slices:
            spec = TensorSpec(item.dtype, item.global_shape)
            assert described.setdefault(item.name, spec) == spec, f"ranks disagree on {item.name}"
            digests = written[file.name][item.key] if written else ""
            piece = TensorPiece(file.name, item.key, item.offset, item.shape, digests)
            pieces[item.name].append(piece)
    return {
        name: TensorEntry(
            spec.dtype, spec.shape, tuple(sorted(pieces[name], key=lambda p: p.offset))
        )
        for name, spec in sorted(described.items())
    }
