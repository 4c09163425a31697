"""The run folder of a pretraining, on rank 0: its steps, the ledger, timings, and a work folder for
the files that must survive a kill until the run is finished."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from trainyard import json_text
from trainyard.artifacts import store
from trainyard.artifacts.lines import read_lines
from trainyard.artifacts.manifest import PartRecord, read_manifest
from trainyard.artifacts.output import Output
from trainyard.artifacts.store import FileRecord, OutputFile
from trainyard.artifacts.urls import join
from trainyard.checkpoint.background import SaveReport
from trainyard.training.loop.ledger import FILE as LEDGER
from trainyard.training.loop.throughput import FILE as TIMINGS
from trainyard.training.run.documents import PREFIX as OF_SAVES
from trainyard.training.run.documents import SAVES, keep_save, kept_files
from trainyard.training.run.run_steps import (
    FoundSteps,
    finished_steps,
    remove_all_but,
    set_aside,
)


class RunFolder(ABC):
    """One run folder. Subclasses define how its files enter the manifest."""

    def __init__(self, output: Output, work_url: str, lineage: str) -> None:
        """work_url: folder that outlives kills, of this run alone."""
        self._output, self._url, self._work_url = output, output.url, work_url
        self._lineage = lineage
        self.found = FoundSteps()
        """The steps in the folder, as this run may use them."""

    @abstractmethod
    def _open(self, name: str, volatile: bool = False) -> AbstractContextManager[OutputFile]:
        """Start a file that is listed in the manifest once it is closed."""

    @abstractmethod
    def _record(self, record: FileRecord) -> None:
        """List a file that is already written."""

    @abstractmethod
    def _record_part(self, part: PartRecord) -> None:
        """Name a step in the manifest."""

    @abstractmethod
    def _retire_manifest(self) -> None:
        """Retire the manifest of a finished run, before any file is replaced."""

    def make_room(self) -> None:
        """Before the first save: move the steps of other runs aside, remove torn steps, retire the
        old manifest."""
        if self.found.foreign:  # what the steps to move cost, not ours
            for name in (TIMINGS, SAVES):
                store.delete(self._output.file_url(name))
        set_aside(self._url, self.found.foreign + self.found.damaged)
        remove_all_but(self._url, self.found.staying + self.found.passing)
        self._retire_manifest()

    # --- until the run is finished --------------------------------------------------------------

    def keep_timings(self, step: int, lines: list[str]) -> None:
        """Keep the timings up to a step."""
        text = "".join(line + "\n" for line in lines)
        store.write_bytes(join(self._work_url, f"timings-{step:07d}.jsonl"), text.encode())

    def keep_save(self, report: SaveReport) -> None:
        """Keep the cost of a save; called from any thread."""
        keep_save(self._work_url, report)

    def remembered(self, key: str) -> dict[str, Any] | None:
        """The document that an earlier, unfinished attempt at this run stored under a name."""
        url = self._unit_url(key)
        found: dict[str, Any] | None = store.read_json(url) if store.exists(url) else None
        return found

    def remember(self, key: str, document: Mapping[str, Any]) -> None:
        """Store a document for the next attempt."""
        store.write_bytes(self._unit_url(key), json.dumps(document).encode())

    def _unit_url(self, key: str) -> str:
        return join(self._work_url, f"{key}.unit.json")

    # --- documents ------------------------------------------------------------------------------

    def write_volatile(self, name: str, document: Any) -> None:
        """Write a JSON document that is listed, and that no digest of the run covers."""
        text = json.dumps(document, indent=1, allow_nan=False) + "\n"
        with self._open(name, volatile=True) as out:
            out.write(text.encode())

    def write_unfinished(self, name: str, document: Any) -> bool:
        """Write a volatile document of a run that was stopped or failed, before it has a manifest.

        False, and nothing written, if the manifest of a finished run lists its own."""
        if read_manifest(self._output.manifest_url) is not None:
            return False
        self.write_volatile(name, document)
        return True

    def finish(self) -> None:
        """Name every step that stays; write the whole ledger, timings and saves, a line in memory
        at a time."""
        with self._open(LEDGER) as out:
            steps = finished_steps(self._url, self._lineage, out.write, self.found.damaged)
        for part in steps.parts:
            self._record_part(part)
        for record in steps.files:
            self._record(record)
        for name, prefix in ((TIMINGS, "timings-"), (SAVES, OF_SAVES)):
            lines = _joined(self._output.file_url(name), kept_files(self._work_url, prefix))
            with self._open(name, volatile=True) as out:
                for line in lines:
                    out.write(line + b"\n")

    def ledger(self) -> Iterator[dict[str, Any]]:
        """The steps of the finished run."""
        for line in read_lines(self._output.file_url(LEDGER)):
            yield json_text.loads(line)


def _joined(before: str, new: Sequence[str]) -> Iterator[bytes]:
    """The lines of a run that was finished before and went on: those of earlier steps, and those of
    the new files."""
    if store.exists(before):
        first = min(map(_step_of, _lines(new)), default=None)
        for line in read_lines(before):
            if first is None or _step_of(line) < first:
                yield line
    yield from _lines(new)


def _lines(urls: Sequence[str]) -> Iterator[bytes]:
    for url in urls:
        yield from read_lines(url)


def _step_of(line: bytes) -> int:
    return int(json_text.loads(line)["step"])
