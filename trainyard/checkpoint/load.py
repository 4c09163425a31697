"""Reading a checkpoint: by global name, whole or by slice, whatever layout wrote it.

`open_checkpoint` reads manifest and index; tensors are read when asked for, by a few threads, and
only the bytes that the answer needs. Nothing found at a path is an error, never random weights.
Nothing that a step holds is trusted: what is damaged or hostile is an ArtifactError that names the
file, and nothing outside the step folder is read."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch.distributed import ProcessGroup

from trainyard.artifacts.manifest import Manifest
from trainyard.checkpoint.layout import Held, refuse_differences, slices_held
from trainyard.checkpoint.safetensors.file import DTYPES, TensorFile, box_of, fetch_all
from trainyard.checkpoint.safetensors.ranges import Want
from trainyard.checkpoint.shared_load import Wanted, fill_together
from trainyard.checkpoint.stored_step import StoredStep, Verify, open_step_as
from trainyard.parallel.groups import gather_or_raise

log = logging.getLogger(__name__)


class Checkpoint(StoredStep[TensorFile]):
    """One step at rest. Use as a context manager, or `close` when the tensors are read."""

    def __init__(self, url: str, manifest: Manifest, verify: Verify = "sizes") -> None:
        super().__init__(url, manifest, verify, TensorFile)

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU."""
        shape = self._entry(name).shape
        return self.read_slice(name, (0,) * len(shape), shape)

    def read_slice(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """The box of a tensor that begins at `offset` and has `shape`; nothing else is read."""
        self.files.open(place.piece.file for place in self.locate(name, offset, shape))
        # Only now is it known that there are so many bytes: before, a document said so.
        box = torch.empty(tuple(shape), dtype=DTYPES[self._entry(name).dtype])
        self.fill([(name, offset, box)])
        return box

    def fill(self, wanted: Iterable[Wanted]) -> int:
        """Boxes of tensors into memory that exists, of any type and device; how many bytes were
        read for it. Memory beside it: a buffer for each of a few threads."""
        placed = [
            (place, target)
            for name, offset, target in wanted
            for place in self.locate(name, offset, tuple(target.shape))
        ]
        files = self.files.open(place.piece.file for place, _ in placed)
        wants: dict[str, list[Want[torch.Tensor]]] = defaultdict(list)
        for place, target in placed:
            file, memory = place.piece.file, box_of(target.detach(), place.at, place.shape)
            wants[file].append(files[file].want(place.piece.key, place.offset, memory))
        size = fetch_all([(files[name], files[name].plan(wants[name])) for name in sorted(wants)])
        for opened in files.values():
            opened.check_unchanged()
        return size


def open_checkpoint(url: str, option: str = "--load", verify: Verify = "sizes") -> Checkpoint:
    """The checkpoint at a step folder, or the latest step of a run folder.

    Raises ConfigError, naming `option`, when there is none; ArtifactError when it is damaged."""
    return open_step_as(Checkpoint, url, option, verify)


# --- into tensors that exist --------------------------------------------------------------------


def restore(
    checkpoint: Checkpoint,
    targets: Mapping[str, Held],
    prefix: str,
    elsewhere: Collection[str] = (),
    share: ProcessGroup | None = None,
) -> None:
    """Fill tensors by global name from all that the checkpoint holds under `prefix`, in place.

    elsewhere: names that other ranks fill. share: ranks that all call this now; each byte that some
    of them need is then read by one of them alone, and handed on (see `share`).
    Raises ArtifactError, before anything is changed, that lists what is missing, unexpected or of
    another shape."""
    shards = {name: slices_held(name, held) for name, held in targets.items()}
    specs = {name: checkpoint.spec(name) for name in checkpoint.names(prefix)}
    gather_or_raise(
        lambda: refuse_differences(checkpoint.url, specs, shards, prefix, elsewhere), share
    )
    wanted = [(name, s.offset, s.tensor) for name, held in sorted(shards.items()) for s in held]
    started = time.monotonic()
    with torch.no_grad():
        if share is None:
            size = checkpoint.fill(wanted)
        else:
            size = fill_together(checkpoint.files, checkpoint.locate, wanted, share)
    seconds = time.monotonic() - started
    log.info(
        "restored %s tensors=%d bytes_read=%d seconds=%.2f gigabytes_per_second=%.2f",
        *(prefix + "*", len(shards), size, seconds, size / 1e9 / max(seconds, 1e-9)),
    )
