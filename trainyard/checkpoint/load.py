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
from functools import cached_property
from types import TracebackType
from typing import Any

import torch
from torch.distributed import ProcessGroup

from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.manifest import Manifest
from trainyard.artifacts.urls import basename, join
from trainyard.checkpoint.fit import refuse_differences
from trainyard.checkpoint.header import DTYPES, TensorSpec
from trainyard.checkpoint.index import Entry, Located, check_version, locate, parse_index
from trainyard.checkpoint.layout import Held, slices_held
from trainyard.checkpoint.ranges import Want
from trainyard.checkpoint.share import Wanted, agree, fill_together
from trainyard.checkpoint.stepfiles import StepFiles, Verify, check_digest
from trainyard.checkpoint.steps import (
    CONFIG,
    INDEX,
    STATE,
    TOKENIZER,
    check_inside,
    find_steps,
    latest_step,
    locate_step,
    step_of,
)
from trainyard.checkpoint.strict import check_depth, parse_json, shown
from trainyard.checkpoint.tensorfile import box_of
from trainyard.checkpoint.threads import fetch_all
from trainyard.errors import ArtifactError

__all__ = ["Checkpoint", "Verify", "find_steps", "latest_step", "open_checkpoint", "restore"]

log = logging.getLogger(__name__)


class Checkpoint:
    """One step at rest. Use as a context manager, or `close` when the tensors are read."""

    def __init__(self, url: str, manifest: Manifest, verify: Verify = "sizes") -> None:
        self.url = url
        self.manifest = manifest
        self.verify = verify
        self._records = {record.path: record for record in manifest.files}
        check_inside(url, self._records)
        self.index: dict[str, Entry] = parse_index(self._parsed(INDEX), join(url, INDEX))
        self.files = StepFiles(url, self._records, self.index, verify)

    def check(self) -> None:
        """Everything that the step has, as `verify` says, whether it will be read or not.

        Raises ArtifactError for the first file that is not as published."""
        if self.verify == "none":
            return
        sizes = store.list_files(self.url)
        for name, record in sorted(self._records.items()):
            if sizes.get(name) != record.size_bytes:
                found = f"{sizes[name]} bytes" if name in sizes else "missing"
                raise ArtifactError(
                    f"{join(self.url, name)}: {found}, manifest.json says {record.size_bytes} bytes"
                )
        if self.verify == "digests":
            self.files.open(self.files.names)
            for name in sorted(self._records.keys() - set(self.files.names)):
                data = store.read_bytes(join(self.url, name))
                check_digest(self.url, name, self._records[name], digest_bytes(data))

    # --- documents ------------------------------------------------------------------------

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
        step = self.state.get("step")
        if type(step) is not int or step < 0:
            raise ArtifactError(f"{join(self.url, STATE)}: step is {shown(step)}, not a count")
        return step

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
        document: dict[str, Any] = self._parsed(name)
        check_version(document, join(self.url, name))
        check_depth(document, join(self.url, name))
        return document

    def _parsed(self, name: str) -> Any:
        url = join(self.url, name)
        data = store.read_bytes(url)
        if self.verify == "digests":
            check_digest(self.url, name, self._records.get(name), digest_bytes(data))
        return parse_json(data, url)

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

    def locate(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> list[Located]:
        """Where the parts of a box of a tensor lie."""
        return locate(self._entry(name), offset, shape)

    def _entry(self, name: str) -> Entry:
        try:
            return self.index[name]
        except KeyError:
            raise ArtifactError(f"{self.url}: the checkpoint holds no tensor {name!r}") from None

    def close(self) -> None:
        """Let the files go; tensors that were read stay."""
        self.files.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_checkpoint(url: str, option: str = "--load", verify: Verify = "sizes") -> Checkpoint:
    """The checkpoint at a step folder, or the latest step of a run folder.

    Raises ConfigError, naming `option`, when there is none; ArtifactError when it is damaged."""
    step_url, manifest = locate_step(url, option)
    checkpoint = Checkpoint(step_url, manifest, verify)
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
    share: ProcessGroup | None = None,
) -> None:
    """Fill tensors by global name from all that the checkpoint holds under `prefix`, in place.

    elsewhere: names that other ranks fill. share: ranks that all call this now; each byte that some
    of them need is then read by one of them alone, and handed on (see `share`).
    Raises ArtifactError, before anything is changed, that lists what is missing, unexpected or of
    another shape."""
    shards = {name: slices_held(name, held) for name, held in targets.items()}
    specs = {name: checkpoint.spec(name) for name in checkpoint.names(prefix)}
    agree(lambda: refuse_differences(checkpoint.url, specs, shards, prefix, elsewhere), share)
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
