"""Reading a checkpoint: by global name, whole or by slice, whatever layout wrote it.

`open_checkpoint` reads manifest, index and state; tensors are read when asked for, and only the
bytes that the answer needs. Nothing found at a path is an error, never random weights."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any

import torch

from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest
from trainyard.artifacts.urls import basename, join
from trainyard.checkpoint.index import Entry, Piece, check_version, parse_index
from trainyard.checkpoint.layout import Held, ShardedTensor, slices_held
from trainyard.checkpoint.steps import (
    CONFIG,
    INDEX,
    STATE,
    TOKENIZER,
    find_steps,
    latest_step,
    locate_step,
    step_of,
)
from trainyard.checkpoint.tensorfile import DTYPES, TensorFile, TensorSpec
from trainyard.errors import ArtifactError

__all__ = ["Checkpoint", "find_steps", "latest_step", "open_checkpoint", "restore"]

log = logging.getLogger(__name__)

LISTED = 20
"""Tensors named in a refusal; the rest are counted."""


class Checkpoint:
    """One step at rest. Use as a context manager, or `close` when the tensors are read."""

    def __init__(self, url: str, manifest: Manifest) -> None:
        self.url = url
        self.manifest = manifest
        index_url = join(url, INDEX)
        self.index: dict[str, Entry] = parse_index(store.read_json(index_url), index_url)
        self._files: dict[str, TensorFile] = {}
        for entry in self.index.values():
            for piece in entry.pieces:
                if manifest.record(piece.file) is None:
                    raise ArtifactError(
                        f"{index_url}: names {piece.file}, which manifest.json does not list"
                    )

    @cached_property
    def state(self) -> dict[str, Any]:
        """What the run was at: step, consumed samples, schedule, as its trainer gave them."""
        return self.document(STATE)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model and the run that made it."""
        return self.document(CONFIG)

    @property
    def step(self) -> int:
        """Training steps done."""
        return int(self.state["step"])

    @property
    def digest(self) -> str:
        """Of all that the step holds: equal for equal contents, wherever it lies."""
        return self.manifest.output_digest

    @property
    def tokenizer_url(self) -> str:
        """Folder of the tokenizer files that the step carries."""
        return join(self.url, TOKENIZER)

    def document(self, name: str) -> dict[str, Any]:
        """A JSON document of the step; ArtifactError for a newer format."""
        url = join(self.url, name)
        document: dict[str, Any] = store.read_json(url)
        check_version(document, url)
        return document

    # --- tensors --------------------------------------------------------------------------

    def names(self, prefix: str = "") -> list[str]:
        """Global names that begin with `prefix`, sorted."""
        return sorted(name for name in self.index if name.startswith(prefix))

    def spec(self, name: str) -> TensorSpec:
        """Type and global shape."""
        entry = self._entry(name)
        return TensorSpec(entry.dtype, entry.shape)

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU."""
        shape = self._entry(name).shape
        return self.read_slice(name, (0,) * len(shape), shape)

    def read_slice(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """The box of a tensor that begins at `offset` and has `shape`; nothing else is read."""
        entry = self._entry(name)
        found = [(piece, _common(offset, shape, piece)) for piece in entry.pieces]
        boxes = [(piece, box) for piece, box in found if box is not None]
        if len(boxes) == 1:
            return self._read_piece(boxes[0][0], entry, offset, shape)
        whole = torch.empty(tuple(shape), dtype=DTYPES[entry.dtype])
        for piece, (begin, extent) in boxes:
            target = whole
            for dim, (b, o, n) in enumerate(zip(begin, offset, extent, strict=True)):
                target = target.narrow(dim, b - o, n)
            target.copy_(self._read_piece(piece, entry, begin, extent))
        return whole

    def _read_piece(
        self, piece: Piece, entry: Entry, offset: Sequence[int], shape: Sequence[int]
    ) -> torch.Tensor:
        """A box, in global coordinates, that lies within one piece."""
        file = self._file(piece.file)
        extent = file.extents.get(piece.key)
        spec = TensorSpec(entry.dtype, piece.shape)
        if extent is None or extent.spec != spec:
            held = "no such tensor" if extent is None else extent.spec.text
            raise ArtifactError(
                f"{file.url}: {INDEX} says {piece.key!r} is {spec.text}, the file holds {held}"
            )
        local = [o - p for o, p in zip(offset, piece.offset, strict=True)]
        return file.read_slice(piece.key, local, shape)

    def _entry(self, name: str) -> Entry:
        try:
            return self.index[name]
        except KeyError:
            raise ArtifactError(f"{self.url}: the checkpoint holds no tensor {name!r}") from None

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            url = join(self.url, name)
            record = self.manifest.record(name)
            size = store.info(url).size_bytes
            if record is not None and size != record.size_bytes:
                raise ArtifactError(
                    f"{url}: {size} bytes, manifest.json says {record.size_bytes}; "
                    f"the file is truncated or was replaced"
                )
            self._files[name] = TensorFile(url)
        return self._files[name]

    def close(self) -> None:
        """Let the files go; tensors that were read stay."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _common(
    offset: Sequence[int], shape: Sequence[int], piece: Piece
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Global offset and shape of what a piece holds of a box; None when it holds nothing of it."""
    begins = [max(o, p) for o, p in zip(offset, piece.offset, strict=True)]
    sides = zip(offset, shape, piece.offset, piece.shape, strict=True)
    ends = [min(o + s, p + n) for o, s, p, n in sides]
    if any(e <= b for b, e in zip(begins, ends, strict=True)):
        return None
    return tuple(begins), tuple(e - b for b, e in zip(begins, ends, strict=True))


def open_checkpoint(url: str, option: str = "--load") -> Checkpoint:
    """The checkpoint at a step folder, or the latest step of a run folder.

    Raises ConfigError, naming `option`, when there is none; ArtifactError when it is damaged."""
    step_url, manifest = locate_step(url, option)
    checkpoint = Checkpoint(step_url, manifest)
    named = step_of(basename(step_url))
    if named is not None and checkpoint.step != named:
        raise ArtifactError(f"{step_url}: {STATE} says step {checkpoint.step}; it was renamed")
    num_tensors = len(checkpoint.index)
    log.info("opened checkpoint step=%d tensors=%d url=%s", checkpoint.step, num_tensors, step_url)
    return checkpoint


# --- into tensors that exist --------------------------------------------------------------------


def restore(
    checkpoint: Checkpoint,
    targets: Mapping[str, Held],
    prefix: str,
    elsewhere: Collection[str] = (),
) -> None:
    """Fill tensors by global name from all that the checkpoint holds under `prefix`, in place.

    elsewhere: names that other ranks fill.
    Raises ArtifactError, before anything is changed, that lists what is missing, unexpected or of
    another shape."""
    shards = {name: slices_held(name, held) for name, held in targets.items()}
    _refuse_differences(checkpoint, shards, prefix, elsewhere)
    with torch.no_grad():
        for name, held in sorted(shards.items()):
            for shard in held:
                extent = tuple(shard.tensor.shape)
                shard.tensor.copy_(checkpoint.read_slice(name, shard.offset, extent))


def _refuse_differences(
    checkpoint: Checkpoint,
    shards: Mapping[str, Sequence[ShardedTensor]],
    prefix: str,
    elsewhere: Collection[str],
) -> None:
    held = checkpoint.names(prefix)
    missing = sorted(set(shards) - set(held))
    unexpected = sorted(set(held) - set(shards) - set(elsewhere))
    differing = []
    for name in sorted(set(shards) & set(held)):
        if not shards[name]:
            continue
        spec, wanted = checkpoint.spec(name), shards[name][0]
        if spec.shape != tuple(wanted.global_shape):
            differing.append(f"{name} is {list(spec.shape)}, wanted {list(wanted.global_shape)}")
        elif DTYPES[spec.dtype].is_floating_point != wanted.tensor.dtype.is_floating_point:
            differing.append(f"{name} is {spec.dtype}, wanted {wanted.tensor.dtype}")
    lists = (
        _listed("missing", missing)
        + _listed("unexpected", unexpected)
        + _listed("of another shape or type", differing)
    )
    if lists:
        raise ArtifactError(
            f"{checkpoint.url}: the tensors under {prefix!r} do not fit what they are loaded into; "
            f"check that the model options are those of the checkpoint{lists}"
        )


def _listed(label: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    lines = "".join(f"\n    {name}" for name in names[:LISTED])
    more = f"\n    ... and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"\n  {len(names)} {label}:{lines}{more}"
