"""Copying a step from the folders of nodes into the store of its run, beside training.

Every rank copies the files that it wrote, from its node; the first one the documents, and the
manifest when all files are there as they were published. Until then the store has no such step. One
step is under way at a time; a copy that is no longer wanted is broken off and removed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest, Slot, read_manifest
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.store import FileRecord, SourceFile
from trainyard.artifacts.urls import basename, join
from trainyard.checkpoint.background import SaveReport
from trainyard.checkpoint.node_local.steps import read_documents
from trainyard.checkpoint.save import PreparedStep, Ranks, clear_step, publish_step
from trainyard.errors import ArtifactError, TrainyardError

log = logging.getLogger(__name__)

Done = Callable[[list[FileRecord], SaveReport], object]
"""Told of a step that is in the store, on the first rank."""


class _NotWantedError(Exception):
    """The copy is to be broken off."""


class LazyUpload:
    """Copies one step at a time in a thread, on every rank alike."""

    def __init__(self, root_url: str, lineage: str, ranks: Ranks, done: Done) -> None:
        """root_url: the run folder. ranks: with a group that nobody else uses."""
        self._root_url, self._lineage, self._ranks, self._done = root_url, lineage, ranks, done
        self._thread: threading.Thread | None = None
        self._unwanted = threading.Event()
        self._is_over = False
        self._step: int | None = None
        self._newest = 0
        """Step that the store has anyway."""

    @property
    def pinned(self) -> int | None:
        """The step that is being read."""
        return self._step if self._thread is not None and self._thread.is_alive() else None

    def offer(self, prepared: PreparedStep, ranks: Ranks) -> None:
        """A step that is whole in all folders: copy it, unless one is under way on any rank. Every
        rank calls this; ranks: those of the caller's thread."""

        def is_free() -> bool:
            return self.pinned is None and not self._is_over and prepared.step > self._newest

        if all(ranks.gather(is_free)):
            self._begin(prepared)

    def _begin(self, prepared: PreparedStep) -> None:
        names = [file.name for file in prepared.planned if file.writer == self._ranks.rank]
        began = time.monotonic()
        self._unwanted.clear()
        self._step = prepared.step
        if self._step <= self._newest:  # it was overtaken while ranks agreed on it
            self._unwanted.set()

        def work() -> None:
            try:
                report = self._copy(prepared, names, began)
            except (TrainyardError, OSError) as error:
                log.warning(
                    "step %d could not be copied to %s, training goes on: %s",
                    *(prepared.step, self._root_url, error),
                )
                return
            if report is None and self._ranks.rank == 0:
                log.info("step %d is not copied to %s any more", prepared.step, self._root_url)

        self._thread = threading.Thread(target=work, name="lazy upload", daemon=True)
        self._thread.start()

    def overtake(self, step: int) -> None:
        """The store has this step: break off the copy of one before it."""
        self._newest = step
        if self._step is not None and self._step <= step:
            self._unwanted.set()

    def close(self) -> None:
        """Break off what is under way, and begin nothing more."""
        self._is_over = True
        self._unwanted.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # --- in the thread ------------------------------------------------------------------------

    def _copy(
        self, prepared: PreparedStep, names: Sequence[str], began: float
    ) -> SaveReport | None:
        """None: it was broken off."""
        source, first = prepared.url, self._ranks.rank == 0
        target = join(self._root_url, basename(source))
        cleared = self._ranks.gather(lambda: clear_step(target, self._lineage) if first else None)
        copied = self._ranks.gather(lambda: self._files(source, target, names))
        if any(records is None for records in copied):
            self._ranks.gather(lambda: store.delete_tree(target) if first else None)
            return None
        files = [record for records in copied for record in records or ()]
        finished = self._ranks.gather(
            lambda: self._publish(source, target, files, cleared[0]) if first else []
        )[0]
        size = sum(record.size_bytes for record in finished)
        report = SaveReport(prepared.step, size, 0.0, time.monotonic() - began, "upload")
        if first:
            self._done(finished, report)
        return report

    def _files(self, source: str, target: str, names: Sequence[str]) -> list[FileRecord] | None:
        try:
            return [self._file(join(source, name), join(target, name)) for name in names]
        except _NotWantedError:
            return None

    def _file(self, source: str, target: str) -> FileRecord:
        found = store.info(source)
        with store.open_output(target, basename(target)) as out:
            self._check(0)
            out.append_files([SourceFile(source, found.size_bytes, found.version)], self._check)
        return out.record

    def _check(self, num_bytes: int) -> None:
        if self._unwanted.is_set():
            raise _NotWantedError

    def _publish(
        self, source: str, target: str, files: Sequence[FileRecord], slot: Slot | None
    ) -> list[FileRecord]:
        found = read_manifest(join(source, MANIFEST))
        if found is None:
            raise ArtifactError(f"{source}: its {MANIFEST} is gone")
        manifest: Manifest = found[0]
        records = list(files)
        for name, data in read_documents(source).items():
            if name != MANIFEST:
                records.append(store.write_bytes(join(target, name), data, name))
        published = {record.path: record for record in manifest.files}
        for record in records:
            if record != published.pop(record.path, None):
                raise ArtifactError(
                    f"{join(source, record.path)}: not what was saved any more: its digest is "
                    f"{record.digest}"
                )
        if published:
            raise ArtifactError(f"{source}: nobody wrote {next(iter(published))}")
        return publish_step(target, manifest, slot)
