"""A step again, in another number of files: the same tensors, and everything else bit for bit.

Streams: a few blocks of rows are in memory, whatever the size of the model and its tensors. Bytes
are only moved, so nothing here needs torch, whose import takes longer than to move a gigabyte."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from threading import Event, Lock
from typing import TYPE_CHECKING

from trainyard.artifacts.store import OutputFile
from trainyard.checkpoint.index import Entry, Located, encode_index, locate
from trainyard.checkpoint.plan import (
    PlannedFile,
    Slice,
    entries_of,
    kind_of,
    plan_files,
    split_large,
)
from trainyard.checkpoint.safetensors.header import (
    ITEM_BYTES,
    TensorSpec,
    encode_header,
    file_order,
)
from trainyard.checkpoint.safetensors.joined import Joined, copy
from trainyard.checkpoint.safetensors.shard import READ_BYTES, REMOTE_THREADS, ShardFile, in_threads
from trainyard.checkpoint.steps import INDEX
from trainyard.checkpoint.stored_step import StoredStep

if TYPE_CHECKING:
    import numpy as np

Step = StoredStep[ShardFile]

OpenFile = Callable[[str], AbstractContextManager[OutputFile]]
"""Begins a file of the output, by its name there."""

BLOCK_BYTES = READ_BYTES
"""What passes through memory at once; a few blocks are on the way."""

LOCAL_BLOCK_BYTES = 4 << 20
"""Of rows put together of local files: they are still in the cache when they are hashed."""

LARGE_ROW_BYTES = LOCAL_BLOCK_BYTES // 16
"""From which on a row is not put together twice where memory ends within it."""

FILES_AT_ONCE = 3
"""Files that are being written, each with some blocks in memory."""

RESHARDED = ("model", "optimizer")
"""Kinds whose files are planned anew; those of a rank (rng) are kept as they are."""


def whole_slices(entries: Mapping[str, Entry | TensorSpec], kind: str) -> list[Slice]:
    """The tensors of a kind, cut only where one is too large for a file."""
    slices: list[Slice] = []
    for name, entry in sorted(entries.items()):
        if kind_of(name) == kind:
            whole = Slice(name, entry.dtype, entry.shape, (0,) * len(entry.shape), entry.shape)
            slices += split_large(whole)
    return slices


def plan_shards(kind: str, slices: Iterable[Slice], num_shards: int) -> list[PlannedFile]:
    """`num_shards` balanced files, or as many as there are slices."""
    # Every shard may take any slice, as if each were a rank that holds all of them.
    return plan_files(kind, [list(slices)] * num_shards, sys.maxsize)


def files_written(step: Step, num_shards: int) -> list[str]:
    """Names of all files that `rewrite_step` writes."""
    tensors = [file.name for file in _planned(step, num_shards)]
    return [*tensors, *_files_to_copy(step, _kept(step)), INDEX]


def read_copied(step: Step) -> dict[str, bytes]:
    """The files that go over as they are, each held against the manifest; ArtifactError before
    anything is written."""
    names = _files_to_copy(step, _kept(step))
    return dict(zip(names, in_threads(step.read_file, names, REMOTE_THREADS), strict=True))


def rewrite_step(
    step: Step,
    num_shards: int,
    copied: Mapping[str, bytes],
    open_file: OpenFile,
    advance: Callable[[int], object] = lambda size_bytes: None,
) -> None:
    """Write every file of a step but its manifest; tensors in `num_shards` files of each kind.

    copied: of `read_copied`. open_file: may be called by a few threads at once."""
    planned, kept = _planned(step, num_shards), _kept(step)
    files = step.files.open(step.files.names)
    _write_tensors(step, files, planned, open_file, advance)
    for opened in files.values():
        opened.check_unchanged()
    for name, data in copied.items():
        with open_file(name) as out:
            out.write(data)
    with open_file(INDEX) as out:
        out.write(encode_index({**entries_of(planned), **kept}))


def _planned(step: Step, num_shards: int) -> list[PlannedFile]:
    plans = (plan_shards(kind, whole_slices(step.index, kind), num_shards) for kind in RESHARDED)
    return [file for plan in plans for file in plan]


def _kept(step: Step) -> dict[str, Entry]:
    """Tensors that stay in the files that they are in."""
    return {name: entry for name, entry in step.index.items() if kind_of(name) not in RESHARDED}


class _AbandonedError(Exception):
    """The run ends; what this thread writes is of no use."""


def _write_tensors(
    step: Step,
    files: Mapping[str, ShardFile],
    planned: Sequence[PlannedFile],
    open_file: OpenFile,
    advance: Callable[[int], object],
) -> None:
    """Several files at once: one is read while another is hashed or brought to the disk."""
    over, turn = Event(), Lock()

    def tell(size: int) -> None:
        if over.is_set():
            raise _AbandonedError
        with turn:
            advance(size)

    def write(file: PlannedFile) -> None:
        with open_file(file.name) as out:
            _write(step.index, files, file, out, tell)

    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="rewrite") as threads:
        futures = [threads.submit(write, file) for file in planned]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:  # a signal too: no thread goes on for the rest of a large file
            over.set()
            for future in futures:
                future.cancel()
            raise


def _files_to_copy(step: Step, kept: Mapping[str, Entry]) -> list[str]:
    """Files that go over as they are: documents, tokenizer, ledger, tensors of a rank."""
    tensor_files = {p.file for entry in step.index.values() for p in entry.pieces}
    kept_files = {p.file for entry in kept.values() for p in entry.pieces}
    left_out = (tensor_files - kept_files) | {INDEX}
    return sorted(f.path for f in step.manifest.files if f.path not in left_out)


# --- one file -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that stand in one file as they are wanted."""

    file: ShardFile
    begin: int
    size_bytes: int

    def __len__(self) -> int:
        return self.size_bytes

    def put(self, begin: int, memory: memoryview) -> None:
        """Those from `begin` on, as many as there is room for."""
        self.file.read_into(self.begin + begin, memory)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a tensor of which several files hold a part each."""

    spec: TensorSpec
    parts: tuple[tuple[Located, Run], ...]

    def __len__(self) -> int:
        return self.spec.size_bytes

    @property
    def row_bytes(self) -> int:
        """Of one index along the first dim."""
        return self.spec.size_bytes // self.spec.shape[0]

    def put(self, begin: int, memory: memoryview) -> None:
        """Their bytes from `begin` on, as many as there is room for: whole rows are put together
        where they are wanted, and one that begins or ends elsewhere is cut out of a copy."""
        row_bytes = self.row_bytes
        while memory:
            row, skipped = divmod(begin, row_bytes)
            count = len(memory) // row_bytes if not skipped else 0
            length = count * row_bytes or min(row_bytes - skipped, len(memory))
            if count:
                self._join(row, count, memory[:length])
            else:
                whole = memoryview(bytearray(row_bytes))
                self._join(row, 1, whole)
                copy(whole[skipped : skipped + length], memory[:length])
            begin, memory = begin + length, memory[length:]

    def _join(self, first: int, count: int, memory: memoryview) -> None:
        """Whole rows into memory that they fill."""
        import numpy as np  # a tenth of a second: not where nothing is put together

        dtype = np.dtype(f"u{ITEM_BYTES[self.spec.dtype]}")
        rows = np.frombuffer(memory, dtype).reshape(count, *self.spec.shape[1:])
        for place, run in self.parts:
            begin = max(first, place.at[0])
            shape = (min(first + count, place.at[0] + place.shape[0]) - begin, *place.shape[1:])
            if shape[0] <= 0:
                continue
            part = np.empty(shape, dtype)
            run.put((begin - place.at[0]) * (len(run) // place.shape[0]), _bytes_of(part))
            at = (begin - first, *place.at[1:])
            rows[tuple(slice(b, b + n) for b, n in zip(at, shape, strict=True))] = part


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view("u1").data)


def _write(
    index: Mapping[str, Entry],
    files: Mapping[str, ShardFile],
    planned: PlannedFile,
    out: OutputFile,
    advance: Callable[[int], object],
) -> None:
    by_key = {item.key: item for item in planned.slices}
    specs = {key: item.spec for key, item in by_key.items()}
    order = file_order(specs)
    header = encode_header({key: specs[key] for key in order}, None)
    is_local = all(file.is_local for file in files.values())
    block_bytes = LOCAL_BLOCK_BYTES if is_local else BLOCK_BYTES
    parts = (part for key in order for part in _parts(index, files, by_key[key], block_bytes))
    # Requests to a store wait for each other otherwise.
    pieces = map(_held, parts) if is_local else in_threads(_loaded, parts, REMOTE_THREADS)
    joined = Joined(chain([memoryview(header)], pieces))
    size = len(header) + sum(spec.size_bytes for spec in specs.values())
    out.append_filled(size, joined.fill, _behind(len(header), advance))


def _behind(header_bytes: int, advance: Callable[[int], object]) -> Callable[[int], None]:
    """Tells of the bytes of tensors alone."""
    left = header_bytes

    def tell(size: int) -> None:
        nonlocal left
        of_header = min(left, size)
        left -= of_header
        advance(size - of_header)

    return tell


def _held(part: Run | Rows) -> memoryview | Run | Rows:
    """What is put where it belongs bit by bit; large rows are put together once, before."""
    is_large = isinstance(part, Rows) and part.row_bytes > LARGE_ROW_BYTES
    return _loaded(part) if is_large else part


def _loaded(part: Run | Rows) -> memoryview:
    memory = memoryview(bytearray(len(part)))
    part.put(0, memory)
    return memory


def _parts(
    index: Mapping[str, Entry], files: Mapping[str, ShardFile], item: Slice, block_bytes: int
) -> Iterator[Run | Rows]:
    """The bytes of a slice of whole rows, in order."""
    places = sorted(locate(index[item.name], item.offset, item.shape), key=lambda p: p.at)
    if all(place.shape[1:] == item.shape[1:] for place in places):
        for place in places:
            yield from _cut(_run(files, item, place))
        return
    for block in split_large(item, block_bytes):
        found = locate(index[item.name], block.offset, block.shape)
        yield Rows(block.spec, tuple((place, _run(files, item, place)) for place in found))


def _run(files: Mapping[str, ShardFile], item: Slice, place: Located) -> Run:
    """What a piece holds of some rows of its tensor. It has no other columns than those."""
    assert place.shape[1:] == place.piece.shape[1:], (item, place)
    row_bytes = math.prod(place.shape[1:]) * ITEM_BYTES[item.dtype]
    file = files[place.piece.file]
    first, count = (place.offset[0], place.shape[0]) if place.shape else (0, 1)
    return Run(file, file.extents[place.piece.key].begin + first * row_bytes, count * row_bytes)


def _cut(run: Run) -> Iterator[Run]:
    for begin in range(0, run.size_bytes, BLOCK_BYTES):
        size = min(BLOCK_BYTES, run.size_bytes - begin)
        yield Run(run.file, run.begin + begin, size)
