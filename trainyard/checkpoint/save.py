"""Writing a step: every rank its share of the tensor files, rank 0 the rest, the manifest last.

    iter_0000100/  model-00001-of-0000N.safetensors  optimizer-...  rng-...  index.json  state.json
                   what the trainer adds: config.json  tokenizer/...  ledger.jsonl    manifest.json

A step exists when its manifest does. Equal tensors and documents give equal bytes. A failure on one
rank is a failure on all of them, at the next point where they meet."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trainyard import errors
from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.manifest import Manifest, Slot, publish, read_slot, retire
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.urls import check_relative, join
from trainyard.checkpoint.index import FORMAT_VERSION, encode_index, fault
from trainyard.checkpoint.layout import (
    KINDS,
    SHARD_SIZE_BYTES,
    Held,
    PlannedFile,
    Slice,
    entries_of,
    plan_files,
    slices_held,
    split_large,
)
from trainyard.checkpoint.steps import INDEX, STATE, step_folder
from trainyard.checkpoint.tensorfile import write_tensors
from trainyard.errors import InfrastructureError, TrainyardError

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that save together; one alone needs no group."""

    group: Any
    rank: int
    world_size: int

    def gather(self, produce: Callable[[], T]) -> list[T]:
        """What `produce` returned on each rank, on all of them; if it failed on one, all raise."""
        own: Exception | None = None
        outcome: tuple[Any, tuple[str, str] | None]
        try:
            outcome = (produce(), None)
        except Exception as error:
            own, outcome = error, (None, (type(error).__name__, str(error)))
        outcomes = self._exchange(outcome)
        if own is not None:
            raise own
        for rank, (_, failure) in enumerate(outcomes):
            if failure is not None:
                raise _error_of(rank, *failure)
        return [value for value, _ in outcomes]

    def _exchange(self, outcome: Any) -> list[Any]:
        if self.world_size == 1:
            return [outcome]
        outcomes: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(outcomes, outcome, group=self.group)
        except RuntimeError as error:
            raise InfrastructureError(f"a rank was lost during a save: {error}") from error
        return outcomes


def _error_of(rank: int, kind: str, message: str) -> Exception:
    """The error of another rank, in the class that gives the same exit status."""
    cls = getattr(errors, kind, None)
    text = f"rank {rank} failed to save: {message}"
    if isinstance(cls, type) and issubclass(cls, TrainyardError):
        return cls(text)
    return RuntimeError(f"{text} ({kind})")


# --- the step -----------------------------------------------------------------------------------


def save_step(
    root_url: str,
    step: int,
    tensors: Mapping[str, Held],
    *,
    state: Mapping[str, Any],
    documents: Mapping[str, Mapping[str, Any]],
    files: Mapping[str, bytes],
    lineage: str,
    stage_name: str,
    group: Any = None,
    rank: int = 0,
    world_size: int = 1,
    run: Mapping[str, Any] | None = None,
    shard_size_bytes: int = SHARD_SIZE_BYTES,
) -> list[FileRecord]:
    """Write and publish one step of a run; every rank of `group` calls it.

    tensors: by global name, beginning with "model.", "optimizer." or "rng."; a plain tensor is held
        alike by every rank that passes it and is written once; a ShardedTensor is a slice, and a
        rank may hold several of one tensor.
    state, documents, files: those of rank 0 are written; run: what its manifest says of the run,
        outside every digest.
    Returns, on rank 0, the records of all files relative to `root_url`, the step's own manifest
        among them (volatile); [] on the others.

    A step that is there already is replaced; while that lasts it does not exist."""
    started = time.monotonic()
    step_url = join(root_url, step_folder(step))
    ranks = Ranks(group, rank, world_size)
    parts = _cut(tensors, shard_size_bytes)

    def prepare() -> tuple[list[Slice], Slot | None]:
        slot = clear_step(step_url, lineage) if rank == 0 else None
        return list(parts), slot

    prepared = ranks.gather(prepare)
    planned = plan_step([slices for slices, _ in prepared], shard_size_bytes)
    own = [file for file in planned if file.writer == rank]
    written = ranks.gather(lambda: [_write(step_url, file, parts) for file in own])

    def finish() -> list[FileRecord]:
        if rank != 0:
            return []
        texts = {STATE: encode_document({**state, "step": step})}
        texts |= {name: encode_document(document) for name, document in documents.items()}
        records = [record for records in written for record in records]
        contents = {INDEX: encode_index(entries_of(planned)), **texts, **files}
        records += _write_contents(step_url, contents)
        manifest = Manifest(
            stage=stage_name, lineage=lineage, files=tuple(records), run=dict(run or {})
        )
        return publish_step(step_url, manifest, prepared[0][1])

    records = ranks.gather(finish)[0]
    if rank != 0:
        return []
    seconds, size = time.monotonic() - started, sum(record.size_bytes for record in records)
    log.info(
        "saved checkpoint step=%d seconds=%.2f bytes=%d files=%d url=%s",
        step,
        seconds,
        size,
        len(records),
        step_url,
    )
    return records


def _cut(tensors: Mapping[str, Held], limit_bytes: int) -> dict[Slice, torch.Tensor]:
    """This rank's tensors as the slices that files will hold."""
    parts: dict[Slice, torch.Tensor] = {}
    for name, held in tensors.items():
        for shard in slices_held(name, held):
            for part in split_large(Slice.of(shard), limit_bytes):
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


def kind_of(name: str) -> str:
    """The kind of a tensor, by its global name."""
    kind = name.partition(".")[0]
    assert kind in KINDS, f"{name!r} does not begin with one of {KINDS} and a dot"
    return kind


def _write(step_url: str, file: PlannedFile, parts: Mapping[Slice, torch.Tensor]) -> FileRecord:
    by_key = {item.key: item for item in file.slices}
    specs = {key: item.spec for key, item in by_key.items()}
    with store.open_output(join(step_url, file.name), file.name) as out:
        write_tensors(out, specs, lambda key: parts[by_key[key]])
    return out.record


# --- shared with what rewrites steps ------------------------------------------------------------


def clear_step(step_url: str, by: str) -> Slot | None:
    """Make room for a step: retire its manifest first, then remove what an older save left there.

    Returns what `publish_step` has to replace; None when the place was free."""
    manifest_url = join(step_url, MANIFEST)
    slot = read_slot(manifest_url)
    if slot is not None:
        slot = retire(manifest_url, slot, by)
    for name in store.list_files(step_url):
        if name != MANIFEST:
            store.delete(join(step_url, name))
    return slot


def encode_document(document: Mapping[str, Any]) -> bytes:
    """A JSON document with its format version, equal for equal contents."""
    text = json.dumps({"format_version": FORMAT_VERSION, **document}, indent=1, sort_keys=True)
    return (text + "\n").encode()


def _write_contents(step_url: str, contents: Mapping[str, bytes]) -> list[FileRecord]:
    return [
        store.write_bytes(join(step_url, check_relative(name)), data, name)
        for name, data in sorted(contents.items())
    ]


def publish_step(step_url: str, manifest: Manifest, slot: Slot | None) -> list[FileRecord]:
    """Publish the manifest of a step; the records of its files relative to the run folder."""
    url = join(step_url, MANIFEST)
    publish(url, manifest, slot.version if slot is not None else None)
    data = store.read_bytes(url)
    own = FileRecord(MANIFEST, len(data), digest_bytes(data), volatile=True)
    folder = step_url.rstrip("/").rpartition("/")[2]
    return [replace(record, path=f"{folder}/{record.path}") for record in (*manifest.files, own)]
