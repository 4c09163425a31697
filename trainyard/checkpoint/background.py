"""Saving a step while training goes on: a snapshot in host memory, and a thread that writes it.

What a rank is to write is copied to the host, which is all that an update of the parameters waits
for; the files are written, digested and published from there. One step is under way at a time. The
threads of all ranks meet in a group of their own, so that they do not come between training's
collectives."""

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
"""A step in the run folder; one between, in the folders of nodes or in a shared one; a copy of one
of nodes' folders to the run folder."""

Write: TypeAlias = Callable[[PreparedStep, StepContents, Ranks], list[FileRecord]]
"""`save.write_step`, or what does as it does for another place."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What one save cost."""

    step: int
    bytes: int
    """Of all files, over all ranks."""
    blocked_seconds: float
    """That training waited: until it went on, and an update for the copy to host memory."""
    durable_seconds: float
    """From the beginning until the manifest stood."""
    kind: Kind = "durable"

    @property
    def gigabytes_per_second(self) -> float:
        """Until it was durable."""
        return self.bytes / 1e9 / max(self.durable_seconds, 1e-9)

    def document(self) -> dict[str, Any]:
        """For files of figures."""
        figures = {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }
        return {**figures, "gigabytes_per_second": round(self.gigabytes_per_second, 4)}


class BackgroundSave:
    """Writes one step at a time in a thread, on every rank alike."""

    def __init__(self, ranks: Ranks, write: Write = write_step, kind: Kind = "durable") -> None:
        """ranks: with a group that nobody else uses."""
        self._ranks, self._write, self._kind = ranks, write, kind
        self._memory = HostMemory()
        self._snapshot: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._step = 0
        self._error: BaseException | None = None

    def reserve(self, parts: Mapping[Slice, Tensor]) -> None:
        """Make the host memory for what this rank will have to write now, so that the first save
        blocks training for no longer than the others."""
        self._memory.reserve(parts)

    def start(
        self,
        prepared: PreparedStep,
        contents: StepContents,
        began: float,
        done: Callable[[list[FileRecord], SaveReport], object],
    ) -> None:
        """Begin to copy what this rank has to write, and write it later. The one before must be
        over, and `hold_update` be called before anything of it changes.

        began: when training began to wait (time.monotonic). done: told in the thread, once the step
        is published."""
        assert self._thread is None, f"step {self._step} is still under way"
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
        """The parameters are about to change: not before they are copied."""
        if self._snapshot is not None:
            self._snapshot.hold_update()
            self._snapshot = None

    @property
    def is_under_way(self) -> bool:
        """Whether a step is being written."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> float:
        """Wait until the step is published; returns the seconds that this took. Raises the error
        that kept it from it."""
        began = time.monotonic()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise()
        return time.monotonic() - began

    def check(self) -> None:
        """Raise the error of a step that could not be written, without waiting for one."""
        if self._thread is not None and not self._thread.is_alive():
            self.finish()

    def give_up(self, seconds: float) -> None:
        """Training has failed: let the step become whole within so long, or leave it torn."""
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
