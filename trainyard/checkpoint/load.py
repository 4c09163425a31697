"""Reads a checkpoint by global tensor name, whole or by slice, from any layout.

`open_checkpoint` reads manifest and index. Tensors are read on request, by a few threads, and only
the bytes needed. A missing checkpoint is an error, never random weights. Files are untrusted: a
damaged or hostile one is an ArtifactError that names it, and nothing outside the step is read."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from trainyard.artifacts.manifest import Manifest
from trainyard.checkpoint.copies import Wanted
from trainyard.checkpoint.layout import LocalTensors, refuse_differences, slices_held
from trainyard.checkpoint.safetensors.file import DTYPES, TensorFile, box_of, fetch_all
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.checkpoint.safetensors.ranges import Want
from trainyard.checkpoint.shared_load import LoadGroups, fill_together
from trainyard.checkpoint.stored_step import StoredStep, Verify, open_step_as
from trainyard.parallel.groups import gather_or_raise

log = logging.getLogger(__name__)


class Checkpoint(StoredStep[TensorFile]):
    """One stored step. Use as a context manager, or call `close` after reading."""

    def __init__(self, url: str, manifest: Manifest, verify: Verify = "sizes") -> None:
        super().__init__(url, manifest, verify, TensorFile)

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU."""
        shape = self._entry(name).shape
        return self.read_slice(name, (0,) * len(shape), shape)

    def read_slice(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """The box of a tensor at `offset` with `shape`; reads only its bytes."""
        self.files.open(part.piece.file for part in self.locate(name, offset, shape))
        # Allocate only now: opening the files has checked the size that the index claims.
        box = torch.empty(tuple(shape), dtype=DTYPES[self._entry(name).dtype])
        self.fill([(name, offset, box)])
        return box

    def fill(self, wanted: Iterable[Wanted]) -> int:
        """Read boxes of tensors into existing memory of any type and device; returns the bytes
        read. Needs one more buffer for each of a few threads."""
        located = [
            (part, target)
            for name, offset, target in wanted
            for part in self.locate(name, offset, tuple(target.shape))
        ]
        files = self.files.open(part.piece.file for part, _ in located)
        wants: dict[str, list[Want[torch.Tensor]]] = defaultdict(list)
        for part, target in located:
            file, memory = part.piece.file, box_of(target.detach(), part.at, part.shape)
            wants[file].append(files[file].want(part.piece.key, part.offset, memory))
        size = fetch_all([(files[name], files[name].plan(wants[name])) for name in sorted(wants)])
        for opened in files.values():
            opened.check_unchanged()
        return size


def open_checkpoint(url: str, option: str = "--load", verify: Verify = "sizes") -> Checkpoint:
    """The checkpoint of a step folder, or of the latest step of a run folder.

    Raises ConfigError, which names `option`, for a missing one, ArtifactError for a damaged one."""
    return open_step_as(Checkpoint, url, option, verify)


# --- into existing tensors ----------------------------------------------------------------------


class Restorable(Protocol):
    """What a training loads from: a stored step, or another program's checkpoint."""

    url: str
    manifest: Manifest

    @property
    def config(self) -> dict[str, Any]:
        """`config.json`: the model, and the run that trained it."""

    @property
    def state(self) -> dict[str, Any]:
        """`state.json`: the position of that run."""

    @property
    def step(self) -> int:
        """Training steps done."""

    def names(self, prefix: str = "") -> list[str]:
        """Global names that start with `prefix`, sorted."""

    def spec(self, name: str) -> TensorSpec:
        """Type and global shape."""

    def fill(self, wanted: Iterable[Wanted]) -> int:
        """Read boxes of tensors into existing memory; returns the bytes read."""


def restore(
    checkpoint: Restorable,
    targets: Mapping[str, LocalTensors],
    prefix: str,
    elsewhere: Collection[str] = (),
    share: LoadGroups | None = None,
) -> None:
    """Fill tensors in place, by global name, from all tensors of the checkpoint under `prefix`.

    elsewhere: names that other ranks fill. share: ranks that all call this now; one of them reads
    each byte that any of them needs, and sends it to the others (see `shared_load`).
    Raises ArtifactError, before anything is changed, which lists missing and unexpected tensors and
    those of another shape."""
    shards = {name: slices_held(name, held) for name, held in targets.items()}
    specs = {name: checkpoint.spec(name) for name in checkpoint.names(prefix)}
    gather_or_raise(
        lambda: refuse_differences(checkpoint.url, specs, shards, prefix, elsewhere),
        None if share is None else share.world,
    )
    wanted = [(name, s.offset, s.tensor) for name, held in sorted(shards.items()) for s in held]
    started = time.monotonic()
    with torch.no_grad():
        if share is None or not isinstance(checkpoint, Checkpoint):
            size = checkpoint.fill(wanted)
        else:
            size = fill_together(checkpoint.files, checkpoint.locate, wanted, share)
    seconds = time.monotonic() - started
    log.info(
        "restored %s tensors=%d bytes_read=%d seconds=%.2f gigabytes_per_second=%.2f",
        *(prefix + "*", len(shards), size, seconds, size / 1e9 / max(seconds, 1e-9)),
    )
