"""Saves a step during training: a snapshot in host memory, and a thread that writes it.

Each rank copies its slices to host memory; updates of the parameters wait only for this copy. The
thread hashes, writes and publishes the files. One step is saved at a time. The threads of all ranks
use a separate group, so that they do not mix with training's collectives."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

from torch import Tensor

from trainyard.artifacts.store import FileRecord
from trainyard.checkpoint.plan import Slice
from trainyard.checkpoint.ranks import Ranks
from trainyard.checkpoint.save import PreparedStep, StepContents, write_step
from trainyard.checkpoint.snapshot import HostMemory, Snapshot
from trainyard.errors import InfrastructureError

log = logging.getLogger(__name__)


Kind: TypeAlias = Literal["durable", "local", "global", "upload"]
"""A step in the run folder; one in node-local folders or in a shared folder, in between; a copy
from node-local folders to the run folder."""

Write: TypeAlias = Callable[[PreparedStep, StepContents, Ranks], list[FileRecord]]
"""`save.write_step`, or its counterpart for another folder."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Size and time of one save."""

    step: int
    bytes: int
    """Size of all files, over all ranks."""
    blocked_seconds: float
    """Time that training waited: to start the save, and for the copy before an update."""
    durable_seconds: float
    """From the start until the manifest was published."""
    kind: Kind = "durable"

    @property
    def gigabytes_per_second(self) -> float:
        """Speed over the time until the step was durable."""
        return self.bytes / 1e9 / max(self.durable_seconds, 1e-9)

    def document(self) -> dict[str, Any]:
        """The report as a JSON document."""
        figures = {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }
        return {**figures, "gigabytes_per_second": round(self.gigabytes_per_second, 4)}


class BackgroundSave:
    """Writes one step at a time in a thread, on every rank."""

    def __init__(self, ranks: Ranks, write: Write = write_step, kind: Kind = "durable") -> None:
        """ranks: with a group that is used for nothing else."""
        self._ranks, self._write, self._kind = ranks, write, kind
        self._memory = HostMemory()
        self._snapshot: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._step = 0
        self._error: BaseException | None = None

    def reserve(self, parts: Mapping[Slice, Tensor]) -> None:
        """Allocate host memory for this rank's slices now, so that the first save blocks training
        no longer than the others."""
        self._memory.reserve(parts)

    def start(
        self,
        prepared: PreparedStep,
        contents: StepContents,
        began: float,
        done: Callable[[list[FileRecord], SaveReport], object],
    ) -> None:
        """Start to copy this rank's slices, and write them in a thread. The previous save must be
        over. Call `hold_update` before the slices change.

        began: when training started to wait (time.monotonic). done: called in the thread after the
        step is published."""
        assert self._thread is None, f"step {self._step} is still being saved"
        snapshot = self._memory.copy(prepared.own)
        blocked = time.monotonic() - began

        def work() -> None:
            try:
                copied = replace(prepared, own=snapshot.parts())
                records = self._write(copied, contents, self._ranks)
                size = sum(record.size_bytes for record in records)
                seconds = time.monotonic() - began
                waited = blocked + snapshot.stalled_seconds()
                report = SaveReport(prepared.step, size, waited, seconds, self._kind)
                done(records, report)
            except BaseException as error:
                self._error = error

        self._step, self._snapshot = prepared.step, snapshot
        self._thread = threading.Thread(target=work, name="background save", daemon=True)
        self._thread.start()

    def hold_update(self) -> None:
        """Delay the next update of the parameters until they are copied."""
        if self._snapshot is not None:
            self._snapshot.hold_update()
            self._snapshot = None

    def finish(self) -> float:
        """Wait until the step is published; returns the seconds waited. Raises the error of a save
        that failed."""
        began = time.monotonic()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise()
        return time.monotonic() - began

    def check(self) -> None:
        """Raise the error of a save that failed, without waiting for one that runs."""
        if self._thread is not None and not self._thread.is_alive():
            self.finish()

    def give_up(self, seconds: float) -> None:
        """After a failure of training: give the save this many seconds to finish, or leave it
        incomplete."""
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                log.warning("step %d was still being saved and is lost", self._step)
            elif self._error is not None:
                log.warning("step %d could not be saved: %s", self._step, self._error)

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            if isinstance(error, InfrastructureError):
                raise type(error)(f"saving step {self._step}: {error}") from error
            raise error
