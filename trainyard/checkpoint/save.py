"""Writes a step: each rank its share of the tensor files, rank 0 the rest, the manifest last.
Ranks of a host with little each share files: one of them writes what all of them have.

    iter_0000100/  model-00001-of-0000N.safetensors  optimizer-...  rng-...  index.json  state.json
                   from the trainer: config.json  tokenizer/...  ledger.jsonl         manifest.json

A step exists if its manifest does. Equal tensors and documents give equal bytes. An error on one
rank is raised on all, at the next collective."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest, ManifestSlot
from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.urls import join
from trainyard.checkpoint.handover import Lines, Received, open_lines
from trainyard.checkpoint.index import encode_index, fault
from trainyard.checkpoint.layout import LocalTensors, slices_held
from trainyard.checkpoint.plan import (
    KINDS,
    SHARD_SIZE_BYTES,
    SHARED_FILE_BYTES,
    PlannedFile,
    Slice,
    assign,
    entries_of,
    files_of,
    kind_of,
    share_files,
    split_large,
)
from trainyard.checkpoint.ranks import ALONE, Ranks
from trainyard.checkpoint.safetensors.blocks import Digests
from trainyard.checkpoint.safetensors.file import tensor_chunks, write_tensors
from trainyard.checkpoint.safetensors.header import file_order
from trainyard.checkpoint.safetensors.shard import in_threads
from trainyard.checkpoint.steps import (
    INDEX,
    STATE,
    clear_step,
    encode_document,
    publish_step,
    step_folder,
    write_contents,
)

FILES_AT_ONCE = 2
"""Files that a rank writes at once, since hashing takes longer than writing."""

WORTH_THREADS_BYTES = 32 << 20
"""Size of a rank's files from which it writes several at once."""


@dataclass(frozen=True, slots=True)
class StepContents:
    """The contents of a step other than tensors; rank 0 writes its own."""

    state: Mapping[str, Any]
    documents: Mapping[str, Mapping[str, Any]]
    files: Mapping[str, bytes]
    lineage: str
    stage_name: str
    run: Mapping[str, Any] | None = None
    """Facts of the run for its manifest, outside every digest."""


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step whose files are assigned to ranks, before any is written."""

    url: str
    step: int
    planned: tuple[PlannedFile, ...]
    """The tensor files of all ranks."""
    own: Mapping[Slice, torch.Tensor]
    """Slices that this rank writes or hands over; views of live memory, unless replaced by a
    snapshot."""
    slot: ManifestSlot | None
    """The manifest to replace; on rank 0."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A tensor file of a step that exists."""

    record: FileRecord
    digests: Digests


def save_step(
    root_url: str,
    step: int,
    tensors: Mapping[str, LocalTensors],
    contents: StepContents,
    ranks: Ranks = ALONE,
    shard_size_bytes: int = SHARD_SIZE_BYTES,
    shared_file_bytes: int = SHARED_FILE_BYTES,
) -> list[FileRecord]:
    """Write and publish one step of a run; all of `ranks` call it.

    tensors: by global name, which starts with one of `KINDS`; a plain tensor is
        equal on every rank that passes it and is written once; a ShardedTensor is a slice, and a
        rank may pass several of one tensor.
    Returns, on rank 0, the records of all files relative to `root_url`, including the step's own
        manifest (volatile); [] on the others.

    Replaces an existing step, which does not exist until the new one is published."""
    limits = shard_size_bytes, shared_file_bytes
    prepared = prepare_step(root_url, step, tensors, contents.lineage, ranks, *limits)
    return write_step(prepared, contents, ranks)


def prepare_step(
    root_url: str,
    step: int,
    tensors: Mapping[str, LocalTensors],
    lineage: str,
    ranks: Ranks = ALONE,
    shard_size_bytes: int = SHARD_SIZE_BYTES,
    shared_file_bytes: int = SHARED_FILE_BYTES,
) -> PreparedStep:
    """Assign the slices of a step to ranks and clear its folder; all of `ranks` call it."""
    url = join(root_url, step_folder(step))
    parts = _cut(tensors, shard_size_bytes)

    def prepare() -> tuple[list[Slice], ManifestSlot | None]:
        slot = clear_step(url, lineage) if ranks.rank == 0 else None
        return list(parts), slot

    prepared = ranks.gather(prepare)
    held = [slices for slices, _ in prepared]
    planned = plan_step(held, shard_size_bytes, ranks.places, shared_file_bytes)
    own = {part: parts[part] for file in planned for part in file.held_by(ranks.rank)}
    return PreparedStep(url, step, tuple(planned), own, prepared[0][1])


def share_of_rank(
    tensors: Mapping[str, LocalTensors],
    ranks: Ranks = ALONE,
    shard_size_bytes: int = SHARD_SIZE_BYTES,
) -> dict[Slice, torch.Tensor]:
    """Slices that this rank would save, as views of live memory; all of `ranks` call it."""
    parts = _cut(tensors, shard_size_bytes)
    planned = plan_step(ranks.gather(lambda: list(parts)), shard_size_bytes)
    return {part: parts[part] for file in planned for part in file.held_by(ranks.rank)}


def write_step(prepared: PreparedStep, contents: StepContents, ranks: Ranks) -> list[FileRecord]:
    """Write and publish a prepared step; all of `ranks` call it, in any thread. Returns as
    `save_step`."""
    writers = {
        holder: file.writer
        for file in prepared.planned
        for holder in file.holders
        if holder != file.writer
    }
    lines = open_lines(writers, ranks)

    def write() -> list[WrittenFile]:
        with lines:
            if ranks.rank in writers:
                _hand_over(prepared, writers[ranks.rank], lines, ranks.rank)
            return _write_all(prepared, lines, ranks.rank)

    written = ranks.gather(write)

    def finish() -> list[FileRecord]:
        if ranks.rank != 0:
            return []
        return _finish(prepared, contents, [file for files in written for file in files])

    records = ranks.gather(finish)[0]
    return records if ranks.rank == 0 else []


def _finish(
    prepared: PreparedStep, contents: StepContents, written: Sequence[WrittenFile]
) -> list[FileRecord]:
    """Write everything but tensors, the manifest last."""
    texts = {STATE: encode_document({**contents.state, "step": prepared.step})}
    texts |= {name: encode_document(document) for name, document in contents.documents.items()}
    digests = {file.record.path: file.digests for file in written}
    index = encode_index(entries_of(prepared.planned, digests))
    records = [file.record for file in written]
    records += write_contents(prepared.url, {INDEX: index, **texts, **contents.files})
    manifest = Manifest(
        stage=contents.stage_name,
        lineage=contents.lineage,
        files=tuple(records),
        run=dict(contents.run or {}),
    )
    return publish_step(prepared.url, manifest, prepared.slot)


def _cut(tensors: Mapping[str, LocalTensors], limit_bytes: int) -> dict[Slice, torch.Tensor]:
    """This rank's tensors as slices for files."""
    parts: dict[Slice, torch.Tensor] = {}
    for name, held in tensors.items():
        for shard in slices_held(name, held):
            for part in split_large(shard.slice, limit_bytes):
                if part.shape == tuple(shard.tensor.shape):
                    parts[part] = shard.tensor
                else:
                    first = part.offset[0] - shard.offset[0]
                    parts[part] = shard.tensor.narrow(0, first, part.shape[0])
    return parts


def plan_step(
    held: list[list[Slice]],
    limit_bytes: int,
    places: Sequence[int] | None = None,
    shared_file_bytes: int = SHARED_FILE_BYTES,
) -> list[PlannedFile]:
    """The tensor files of a step, from the slices of each rank. places: see `Ranks`."""
    # One look at each slice: ten thousand ranks have a million of them.
    by_kind: dict[str, list[list[Slice]]] = {kind: [[] for _ in held] for kind in KINDS}
    for rank, items in enumerate(held):
        for item in items:
            by_kind[kind_of(item.name)][rank].append(item)
    assigned = {kind: assign(slices) for kind, slices in by_kind.items()}
    writers: Sequence[int] = range(len(held))
    if places is not None:
        bytes_of = [[sum(s.size_bytes for s in i) for i in items] for items in assigned.values()]
        writers = share_files(list(zip(*bytes_of, strict=True)), places, shared_file_bytes)
    planned = [
        file
        for kind, items in assigned.items()
        for file in files_of(kind, items, writers, limit_bytes)
    ]
    for name, entry in entries_of(planned).items():
        reason = fault(entry)
        assert reason is None, f"{name}: {reason}"
    return planned


def _hand_over(prepared: PreparedStep, writer: int, lines: Lines, rank: int) -> None:
    """Send this rank's tensors to their writer, in the order in which it writes them."""
    for file in prepared.planned:
        if file.writer == writer:
            by_key = {item.key: item for item in file.held_by(rank)}
            for key in file_order({key: item.spec for key, item in by_key.items()}):
                chunks = tensor_chunks(prepared.own[by_key[key]])
                if not all(lines.send(chunk) for chunk in chunks):
                    return


def _write_all(prepared: PreparedStep, lines: Lines, rank: int) -> list[WrittenFile]:
    files = [file for file in prepared.planned if file.writer == rank]
    senders = {holder for file in files for holder in file.holders} - {rank}
    received = lines.received(senders)
    size = sum(part.size_bytes for file in files for part in file.slices)

    def write(file: PlannedFile) -> WrittenFile:
        return _write(prepared, file, received)

    # Ranks send their tensors of one file after another.
    if len(files) < 2 or size < WORTH_THREADS_BYTES or senders:
        return [write(file) for file in files]
    return list(in_threads(write, files, FILES_AT_ONCE))


def _write(
    prepared: PreparedStep, file: PlannedFile, received: Mapping[int, socket.socket]
) -> WrittenFile:
    by_key = {item.key: item for item in file.slices}
    holders = dict(zip(by_key, file.holders or [file.writer] * len(by_key), strict=True))
    specs = {key: item.spec for key, item in by_key.items()}

    def read(key: str) -> torch.Tensor | Received:
        item, holder = by_key[key], holders[key]
        if holder == file.writer:
            return prepared.own[item]
        return Received(received[holder], holder, item.size_bytes)

    with store.open_output(join(prepared.url, file.name), file.name) as out:
        out.write_for(len(set(holders.values())))
        digests = write_tensors(out, specs, read, with_digests=True)
    return WrittenFile(out.record, digests)
