"""A step again, in another number of files: the same tensors, and everything else bit for bit.

Streams: a few blocks of rows are in memory, whatever the size of the model and its tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue

import torch

from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.checkpoint.header import encode_header
from trainyard.checkpoint.index import Entry, encode_index
from trainyard.checkpoint.layout import PlannedFile, Slice, entries_of, plan_files, split_large
from trainyard.checkpoint.load import Checkpoint
from trainyard.checkpoint.save import kind_of
from trainyard.checkpoint.steps import INDEX
from trainyard.checkpoint.tensorfile import (
    DTYPES,
    READ_BYTES,
    Sink,
    TensorSpec,
    file_order,
)
from trainyard.checkpoint.threads import LOCAL_THREADS, in_order

OpenFile = Callable[[str], AbstractContextManager[Sink]]
"""Begins a file of the output, by its name there."""

BLOCK_BYTES = READ_BYTES
"""What passes through memory at once; a few blocks are on the way."""

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


def rewrite_step(
    checkpoint: Checkpoint,
    num_shards: int,
    open_file: OpenFile,
    advance: Callable[[int], object] = lambda size_bytes: None,
) -> None:
    """Write every file of a step but its manifest; tensors in `num_shards` files of each kind."""
    planned: list[PlannedFile] = []
    for kind in RESHARDED:
        planned += plan_shards(kind, whole_slices(checkpoint.index, kind), num_shards)
    checkpoint.files.open(checkpoint.files.names)  # once: threads read them from here on
    for file in planned:
        with open_file(file.name) as out:
            _write(checkpoint, file, out, advance)
    entries = entries_of(planned)
    kept = {n: entry for n, entry in checkpoint.index.items() if kind_of(n) not in RESHARDED}
    for name in _files_to_copy(checkpoint, kept):
        with open_file(name) as out:
            out.write(store.read_bytes(join(checkpoint.url, name)))
    with open_file(INDEX) as out:
        out.write(encode_index({**entries, **kept}))


def _write(
    checkpoint: Checkpoint, file: PlannedFile, out: Sink, advance: Callable[[int], object]
) -> None:
    """One file, block by block; the next blocks are read meanwhile."""
    by_key = {item.key: item for item in file.slices}
    specs = {key: item.spec for key, item in by_key.items()}
    order = file_order(specs)
    out.write(encode_header({key: specs[key] for key in order}, None))

    blocks = (block for key in order for block in split_large(by_key[key], BLOCK_BYTES))
    buffers: SimpleQueue[torch.Tensor] = SimpleQueue()  # fresh memory for each costs page faults

    def read(block: Slice) -> tuple[torch.Tensor, int]:
        buffer = _buffer(buffers, block.size_bytes)
        box = buffer[: block.size_bytes].view(DTYPES[block.dtype]).view(block.shape)
        checkpoint.fill([(block.name, block.offset, box)])
        return buffer, block.size_bytes

    for buffer, size in in_order(read, blocks, LOCAL_THREADS):
        out.write(buffer[:size].numpy().data)
        advance(size)
        buffers.put(buffer)


def _buffer(free: SimpleQueue[torch.Tensor], size_bytes: int) -> torch.Tensor:
    """Memory for a block, that of one before where there is some."""
    try:
        found = free.get_nowait()
    except Empty:
        found = torch.empty(0, dtype=torch.uint8)
    if len(found) >= size_bytes:
        return found
    return torch.empty(max(size_bytes, BLOCK_BYTES), dtype=torch.uint8)


def _files_to_copy(checkpoint: Checkpoint, kept: Mapping[str, Entry]) -> list[str]:
    """Files that go over as they are: documents, tokenizer, ledger, tensors of a rank."""
    tensor_files = {p.file for entry in checkpoint.index.values() for p in entry.pieces}
    kept_files = {p.file for entry in kept.values() for p in entry.pieces}
    left_out = (tensor_files - kept_files) | {INDEX}
    return sorted(f.path for f in checkpoint.manifest.files if f.path not in left_out)
