"""The files of a unit of documents, or of a piece of one, while a worker writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

from stages.runtime.document_units import BAD, DROPPED, KINDS, UnitJob
from trainyard.artifacts import store
from trainyard.artifacts.store import FileRecord, OutputFile
from trainyard.collection.documents import Place, as_line, dropped_line
from trainyard.corpus.documents import BadLine

BUFFER_BYTES = 1 << 20


class UnitFiles:
    """The files of a unit while it is written; use as a context manager. A file that gets no
    document does not appear, and none does if the work fails."""

    def __init__(self, job: UnitJob) -> None:
        self._job = job
        self._open: dict[str, OutputFile] = {}
        self._lines: dict[str, list[bytes | memoryview]] = {kind: [] for kind in (*KINDS, BAD)}
        self._sizes = dict.fromkeys((*KINDS, BAD), 0)

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Add a document to one of the files."""
        self.write_lines(kind, as_line(fields))

    def write_lines(self, kind: str, lines: bytes | memoryview) -> None:
        """Add documents that are lines already, if any."""
        if not len(lines):
            return
        self._lines[kind].append(lines)
        self._sizes[kind] += len(lines)
        if self._sizes[kind] >= BUFFER_BYTES:
            self._flush(kind)

    def write_bad(self, bad: Iterable[tuple[Place, BadLine]]) -> None:
        """Add the bad lines of the unit, after all that was dropped."""
        for one in bad:
            self.write(DROPPED if self._job.piece is None else BAD, dropped_line(*one))

    def _flush(self, kind: str) -> None:
        lines = self._lines[kind]
        if not lines:
            return
        if kind not in self._open:
            name = self._job.name(kind)
            self._open[kind] = store.open_output(store.join(self._job.folder, name), name)
        self._open[kind].write(lines[0] if len(lines) == 1 else b"".join(lines))
        lines.clear()
        self._sizes[kind] = 0

    def __enter__(self) -> UnitFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            for one in self._lines:
                self._flush(one)
        for file in self._open.values():
            file.__exit__(kind, error, trace)

    @property
    def records(self) -> tuple[FileRecord, ...]:
        """The closed files, for the manifest."""
        return tuple(self._open[kind].record for kind in self._lines if kind in self._open)
