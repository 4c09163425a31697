"""A step again, in another number of files: the same tensors, and everything else bit for bit.

Streams: one tensor at a time is in memory, whatever the size of the model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

import torch

from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.checkpoint.index import Entry, encode_index
from trainyard.checkpoint.layout import PlannedFile, Slice, entries_of, plan_files, split_large
from trainyard.checkpoint.load import Checkpoint
from trainyard.checkpoint.save import kind_of
from trainyard.checkpoint.steps import INDEX
from trainyard.checkpoint.tensorfile import Sink, TensorSpec, write_tensors

OpenFile = Callable[[str], AbstractContextManager[Sink]]
"""Begins a file of the output, by its name there."""

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
    by_key = {item.key: item for item in file.slices}

    def read(key: str) -> torch.Tensor:
        item = by_key[key]
        advance(item.size_bytes)
        return checkpoint.read_slice(item.name, item.offset, item.shape)

    write_tensors(out, {key: item.spec for key, item in by_key.items()}, read)


def _files_to_copy(checkpoint: Checkpoint, kept: Mapping[str, Entry]) -> list[str]:
    """Files that go over as they are: documents, tokenizer, ledger, tensors of a rank."""
    tensor_files = {p.file for entry in checkpoint.index.values() for p in entry.pieces}
    kept_files = {p.file for entry in kept.values() for p in entry.pieces}
    left_out = (tensor_files - kept_files) | {INDEX}
    return sorted(f.path for f in checkpoint.manifest.files if f.path not in left_out)
