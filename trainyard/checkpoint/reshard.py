"""Rewrites a step into another number of files; tensors and documents stay equal bit for bit.

Keeps a few blocks of rows in memory, for any size of model. Only moves bytes, so it does without
torch, whose import takes longer than to move a gigabyte."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from threading import Event, Lock
from typing import TYPE_CHECKING

from trainyard.artifacts.store import OutputFile
from trainyard.checkpoint.index import Located, TensorEntry, encode_index, locate
from trainyard.checkpoint.plan import (
    PlannedFile,
    Slice,
    entries_of,
    kind_of,
    plan_shards,
    split_large,
)
from trainyard.checkpoint.safetensors.blocks import BlockDigests, Digests
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
"""Starts a file of the output, by its name there."""

BLOCK_BYTES = READ_BYTES
"""Bytes copied at once; a few blocks are in memory."""

LOCAL_BLOCK_BYTES = 4 << 20
"""Size of blocks of joined rows of local files; they are still in the CPU cache when hashed."""

LARGE_ROW_BYTES = LOCAL_BLOCK_BYTES // 16
"""A row of at least this size is joined once, even if memory ends within it."""

FILES_AT_ONCE = 3
"""Files written at once, each with some blocks in memory."""

RESHARDED = ("model", "optimizer")
"""Kinds whose files are planned again; files of a rank (rng) are kept."""


def whole_slices(entries: Mapping[str, TensorEntry | TensorSpec], kind: str) -> list[Slice]:
    """The tensors of a kind, cut only if one is too large for a file."""
    slices: list[Slice] = []
    for name, entry in sorted(entries.items()):
        if kind_of(name) == kind:
            whole = Slice(name, entry.dtype, entry.shape, (0,) * len(entry.shape), entry.shape)
            slices += split_large(whole)
    return slices


def files_written(step: Step, num_shards: int) -> list[str]:
    """Names of all files that `rewrite_step` writes."""
    tensors = [file.name for file in _planned(step, num_shards)]
    return [*tensors, *_files_to_copy(step, _kept(step)), INDEX]


def read_copied(step: Step) -> dict[str, bytes]:
    """The files that are copied unchanged, each compared with the manifest; ArtifactError before
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
    """Write every file of a step except its manifest; tensors in `num_shards` files per kind.

    copied: from `read_copied`. open_file: a few threads may call it at once."""
    planned, kept = _planned(step, num_shards), _kept(step)
    files = step.files.open(step.files.names)
    digests = _write_tensors(step, files, planned, open_file, advance)
    for opened in files.values():
        opened.check_unchanged()
    for name, data in copied.items():
        with open_file(name) as out:
            out.write(data)
    with open_file(INDEX) as out:
        out.write(encode_index({**entries_of(planned, digests), **kept}))


def _planned(step: Step, num_shards: int) -> list[PlannedFile]:
    plans = (plan_shards(kind, whole_slices(step.index, kind), num_shards) for kind in RESHARDED)
    return [file for plan in plans for file in plan]


def _kept(step: Step) -> dict[str, TensorEntry]:
    """Tensors that stay in their files."""
    return {name: entry for name, entry in step.index.items() if kind_of(name) not in RESHARDED}


class _AbandonedError(Exception):
    """The run fails; this thread's output is not needed."""


def _write_tensors(
    step: Step,
    files: Mapping[str, ShardFile],
    planned: Sequence[PlannedFile],
    open_file: OpenFile,
    advance: Callable[[int], object],
) -> dict[str, Digests]:
    """Several files at once: one is read while another is hashed or written to the disk. Returns
    the digests of their blocks."""
    failed, lock = Event(), Lock()

    def report(size: int) -> None:
        if failed.is_set():
            raise _AbandonedError
        with lock:
            advance(size)

    def write(file: PlannedFile) -> Digests:
        with open_file(file.name) as out:
            return _write(step.index, files, file, out, report)

    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="rewrite") as threads:
        futures = [threads.submit(write, file) for file in planned]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            return {f.name: future.result() for f, future in zip(planned, futures, strict=True)}
        except BaseException:  # a signal too: no thread continues a large file
            failed.set()
            for future in futures:
                future.cancel()
            raise


def _files_to_copy(step: Step, kept: Mapping[str, TensorEntry]) -> list[str]:
    """Files that are copied unchanged: documents, tokenizer, ledger, tensors of a rank."""
    tensor_files = {p.file for entry in step.index.values() for p in entry.pieces}
    kept_files = {p.file for entry in kept.values() for p in entry.pieces}
    left_out = (tensor_files - kept_files) | {INDEX}
    return sorted(f.path for f in step.manifest.files if f.path not in left_out)


# --- one file -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ByteRun:
    """Contiguous bytes of one file, needed as they are."""

    file: ShardFile
    begin: int
    size_bytes: int

    def __len__(self) -> int:
        return self.size_bytes

    def put(self, begin: int, memory: memoryview) -> None:
        """Fill memory with the bytes from `begin` on."""
        self.file.read_into(self.begin + begin, memory)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a tensor, each joined from parts in several files."""

    spec: TensorSpec
    parts: tuple[tuple[Located, ByteRun], ...]

    def __len__(self) -> int:
        return self.spec.size_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one index along the first dim."""
        return self.spec.size_bytes // self.spec.shape[0]

    def put(self, begin: int, memory: memoryview) -> None:
        """Fill memory with the bytes from `begin` on: whole rows are joined in place, and a row cut
        by either end of the memory is copied from a buffer."""
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
        """Join whole rows in memory that they fill."""
        import numpy as np  # takes 0.1 s: not needed if nothing is joined

        dtype = np.dtype(f"u{ITEM_BYTES[self.spec.dtype]}")
        rows = np.frombuffer(memory, dtype).reshape(count, *self.spec.shape[1:])
        for located, run in self.parts:
            begin = max(first, located.at[0])
            end = min(first + count, located.at[0] + located.shape[0])
            shape = (end - begin, *located.shape[1:])
            if shape[0] <= 0:
                continue
            part = np.empty(shape, dtype)
            run.put((begin - located.at[0]) * (len(run) // located.shape[0]), _bytes_of(part))
            at = (begin - first, *located.at[1:])
            rows[tuple(slice(b, b + n) for b, n in zip(at, shape, strict=True))] = part


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view("u1").data)


def _write(
    index: Mapping[str, TensorEntry],
    files: Mapping[str, ShardFile],
    planned: PlannedFile,
    out: OutputFile,
    advance: Callable[[int], object],
) -> Digests:
    by_key = {item.key: item for item in planned.slices}
    specs = {key: item.spec for key, item in by_key.items()}
    order = file_order(specs)
    header = encode_header({key: specs[key] for key in order}, None)
    is_local = all(file.is_local for file in files.values())
    block_bytes = LOCAL_BLOCK_BYTES if is_local else BLOCK_BYTES
    parts = (part for key in order for part in _parts(index, files, by_key[key], block_bytes))
    # Threads, so that requests to a store do not wait for each other.
    pieces = (
        map(_joined_if_large, parts) if is_local else in_threads(_loaded, parts, REMOTE_THREADS)
    )
    joined = Joined(chain([memoryview(header)], pieces))
    size = len(header) + sum(spec.size_bytes for spec in specs.values())
    digests = BlockDigests(len(header), {key: specs[key] for key in order}, _known(index, by_key))
    out.append_filled(size, digests.of_filled(joined.fill), _behind(len(header), advance))
    return digests.by_key


def _known(index: Mapping[str, TensorEntry], by_key: Mapping[str, Slice]) -> Digests:
    """Digests of tensors that stay in one piece: their blocks were compared with these when they
    were read."""
    return {
        key: part.piece.digests
        for key, item in by_key.items()
        for part in locate(index[item.name], item.offset, item.shape)
        if part.piece.digests and (part.piece.offset, part.piece.shape) == (item.offset, item.shape)
    }


def _behind(header_bytes: int, advance: Callable[[int], object]) -> Callable[[int], None]:
    """Calls `advance` for the bytes of tensors, without the header."""
    left = header_bytes

    def report(size: int) -> None:
        nonlocal left
        of_header = min(left, size)
        left -= of_header
        advance(size - of_header)

    return report


def _joined_if_large(part: ByteRun | Rows) -> memoryview | ByteRun | Rows:
    """Large rows are joined once, before they are written; others while they are written."""
    is_large = isinstance(part, Rows) and part.row_bytes > LARGE_ROW_BYTES
    return _loaded(part) if is_large else part


def _loaded(part: ByteRun | Rows) -> memoryview:
    memory = memoryview(bytearray(len(part)))
    part.put(0, memory)
    return memory


def _parts(
    index: Mapping[str, TensorEntry], files: Mapping[str, ShardFile], item: Slice, block_bytes: int
) -> Iterator[ByteRun | Rows]:
    """The bytes of a slice of whole rows, in order."""
    located = sorted(locate(index[item.name], item.offset, item.shape), key=lambda p: p.at)
    if all(part.shape[1:] == item.shape[1:] for part in located):
        for part in located:
            yield from _cut(_run(files, item, part))
        return
    for block in split_large(item, block_bytes):
        found = locate(index[item.name], block.offset, block.shape)
        yield Rows(block.spec, tuple((part, _run(files, item, part)) for part in found))


def _run(files: Mapping[str, ShardFile], item: Slice, part: Located) -> ByteRun:
    """The bytes of some rows in a piece, which has all their columns."""
    assert part.shape[1:] == part.piece.shape[1:], (item, part)
    row_bytes = math.prod(part.shape[1:]) * ITEM_BYTES[item.dtype]
    file = files[part.piece.file]
    first, count = (part.offset[0], part.shape[0]) if part.shape else (0, 1)
    return ByteRun(file, file.extents[part.piece.key].begin + first * row_bytes, count * row_bytes)


def _cut(run: ByteRun) -> Iterator[ByteRun]:
    for begin in range(0, run.size_bytes, BLOCK_BYTES):
        size = min(BLOCK_BYTES, run.size_bytes - begin)
        yield ByteRun(run.file, run.begin + begin, size)
