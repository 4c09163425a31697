"""Writing a step: every rank its share of the tensor files, rank 0 the rest, the manifest last.

    iter_0000100/  model-00001-of-0000N.safetensors  optimizer-...  rng-...  index.json  state.json
                   what the trainer adds: config.json  tokenizer/...  ledger.jsonl    manifest.json

A step exists when its manifest does. Equal tensors and documents give equal bytes. A failure on one
rank is a failure on all of them, at the next point where they meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest, Slot
from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.urls import join
from trainyard.checkpoint.index import encode_index, fault
from trainyard.checkpoint.layout import Held, slices_held
from trainyard.checkpoint.plan import (
    KINDS,
    SHARD_SIZE_BYTES,
    PlannedFile,
    Slice,
    entries_of,
    kind_of,
    plan_files,
    split_large,
)
from trainyard.checkpoint.ranks import ALONE, Ranks
from trainyard.checkpoint.safetensors.file import write_tensors
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
"""Files that a rank writes at once: to hash one takes longer than to write it."""

WORTH_THREADS_BYTES = 32 << 20
"""Of all files of a rank, from which on it writes several at once."""


@dataclass(frozen=True, slots=True)
class StepContents:
    """What a step holds beside tensors; that of rank 0 is written."""

    state: Mapping[str, Any]
    documents: Mapping[str, Mapping[str, Any]]
    files: Mapping[str, bytes]
    lineage: str
    stage_name: str
    run: Mapping[str, Any] | None = None
    """What its manifest says of the run, outside every digest."""


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step of which it is known who writes what; nothing of it is written yet."""

    url: str
    step: int
    planned: tuple[PlannedFile, ...]
    """The tensor files of all ranks."""
    own: Mapping[Slice, torch.Tensor]
    """What this rank is to write, as views of live memory unless they were replaced."""
    slot: Slot | None
    """The manifest that stood there; on rank 0."""


def save_step(
    root_url: str,
    step: int,
    tensors: Mapping[str, Held],
    contents: StepContents,
    ranks: Ranks = ALONE,
    shard_size_bytes: int = SHARD_SIZE_BYTES,
) -> list[FileRecord]:
    """Write and publish one step of a run; every one of `ranks` calls it.

    tensors: by global name, beginning with "model.", "optimizer." or "rng."; a plain tensor is held
        alike by every rank that passes it and is written once; a ShardedTensor is a slice, and a
        rank may hold several of one tensor.
    Returns, on rank 0, the records of all files relative to `root_url`, the step's own manifest
        among them (volatile); [] on the others.

    A step that is there already is replaced; while that lasts it does not exist."""
    prepared = prepare_step(root_url, step, tensors, contents.lineage, ranks, shard_size_bytes)
    return write_step(prepared, contents, ranks)


def prepare_step(
    root_url: str,
    step: int,
    tensors: Mapping[str, Held],
    lineage: str,
    ranks: Ranks = ALONE,
    shard_size_bytes: int = SHARD_SIZE_BYTES,
) -> PreparedStep:
    """Share out the writing of a step and make room for it; every one of `ranks` calls it."""
    url = join(root_url, step_folder(step))
    parts = _cut(tensors, shard_size_bytes)

    def prepare() -> tuple[list[Slice], Slot | None]:
        slot = clear_step(url, lineage) if ranks.rank == 0 else None
        return list(parts), slot

    prepared = ranks.gather(prepare)
    planned = plan_step([slices for slices, _ in prepared], shard_size_bytes)
    own = {part: parts[part] for f in planned if f.writer == ranks.rank for part in f.slices}
    return PreparedStep(url, step, tuple(planned), own, prepared[0][1])


def share_of_rank(
    tensors: Mapping[str, Held],
    ranks: Ranks = ALONE,
    shard_size_bytes: int = SHARD_SIZE_BYTES,
) -> dict[Slice, torch.Tensor]:
    """What this rank would write of a step, as views of live memory; every one of `ranks` calls
    it, and nothing is touched."""
    parts = _cut(tensors, shard_size_bytes)
    planned = plan_step(ranks.gather(lambda: list(parts)), shard_size_bytes)
    return {part: parts[part] for f in planned if f.writer == ranks.rank for part in f.slices}


def write_step(prepared: PreparedStep, contents: StepContents, ranks: Ranks) -> list[FileRecord]:
    """Write and publish what was prepared, on every one of `ranks`, in any thread; returns as
    `save_step`."""
    own_files = [file for file in prepared.planned if file.writer == ranks.rank]
    written = ranks.gather(lambda: _write_all(prepared, own_files))

    def finish() -> list[FileRecord]:
        if ranks.rank != 0:
            return []
        return _finish(prepared, contents, [record for records in written for record in records])

    records = ranks.gather(finish)[0]
    return records if ranks.rank == 0 else []


def _finish(
    prepared: PreparedStep, contents: StepContents, records: list[FileRecord]
) -> list[FileRecord]:
    """Write what is no tensor, the manifest last."""
    texts = {STATE: encode_document({**contents.state, "step": prepared.step})}
    texts |= {name: encode_document(document) for name, document in contents.documents.items()}
    index = encode_index(entries_of(prepared.planned))
    records += write_contents(prepared.url, {INDEX: index, **texts, **contents.files})
    manifest = Manifest(
        stage=contents.stage_name,
        lineage=contents.lineage,
        files=tuple(records),
        run=dict(contents.run or {}),
    )
    return publish_step(prepared.url, manifest, prepared.slot)


def _cut(tensors: Mapping[str, Held], limit_bytes: int) -> dict[Slice, torch.Tensor]:
    """This rank's tensors as the slices that files will hold."""
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


def plan_step(held: list[list[Slice]], limit_bytes: int) -> list[PlannedFile]:
    """The tensor files of a step, from what each rank holds; they make a sound index."""
    planned: list[PlannedFile] = []
    for kind in KINDS:
        of_kind = [[item for item in items if kind_of(item.name) == kind] for items in held]
        planned += plan_files(kind, of_kind, limit_bytes)
    for name, entry in entries_of(planned).items():
        reason = fault(entry)
        assert reason is None, f"{name}: {reason}"
    return planned


def _write_all(prepared: PreparedStep, files: list[PlannedFile]) -> list[FileRecord]:
    size = sum(part.size_bytes for file in files for part in file.slices)
    if len(files) < 2 or size < WORTH_THREADS_BYTES:
        return [_write(prepared.url, file, prepared.own) for file in files]
    return list(in_threads(lambda f: _write(prepared.url, f, prepared.own), files, FILES_AT_ONCE))


def _write(step_url: str, file: PlannedFile, parts: Mapping[Slice, torch.Tensor]) -> FileRecord:
    by_key = {item.key: item for item in file.slices}
    specs = {key: item.spec for key, item in by_key.items()}
    with store.open_output(join(step_url, file.name), file.name) as out:
        write_tensors(out, specs, lambda key: parts[by_key[key]])
    return out.record
