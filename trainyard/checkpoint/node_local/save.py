"""Saving a step into the folders of several nodes (see `local_steps`), the newest few kept.

Each rank writes its share of the tensor files where it is. When all shares are whole the documents
and the manifest go to every folder, and when these are there older steps go: at any moment some
step is whole over all folders, once one was."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest, Slot, read_manifest
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.store import FileRecord, SourceFile
from trainyard.artifacts.urls import basename, join
from trainyard.checkpoint.background import SaveReport
from trainyard.checkpoint.layout import Held
from trainyard.checkpoint.node_local.steps import LocalSteps, read_documents, write_documents
from trainyard.checkpoint.ranks import Ranks
from trainyard.checkpoint.save import PreparedStep, StepContents, prepare_step, write_step
from trainyard.checkpoint.steps import clear_step, publish_step, remove_step, step_of
from trainyard.errors import ArtifactError, TrainyardError

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


log = logging.getLogger(__name__)


class LocalSave:
    """Writes steps of one run; on every rank alike."""

    def __init__(
        self,
        steps: LocalSteps,
        keep_last: int,
        upload: LazyUpload | None = None,
    ) -> None:
        """keep_last: steps that stay. upload: is offered each step that is whole; what it reads
        does not go."""
        self._steps, self._keep_last, self._upload = steps, keep_last, upload

    @property
    def root_url(self) -> str:
        """Of this rank's folder."""
        return self._steps.root_url

    def prepare(
        self, step: int, tensors: Mapping[str, Held], lineage: str, ranks: Ranks
    ) -> PreparedStep:
        """As `save.prepare_step`, with room made in every folder."""
        root = self._steps.root_url

        def clear() -> None:
            if self._steps.places.is_first:
                remove_step(root, step)
                for later in self._there():
                    if later > step:  # of an attempt that this one has left behind
                        remove_step(root, later)

        ranks.gather(clear)
        return prepare_step(root, step, tensors, lineage, ranks)

    def write(
        self, prepared: PreparedStep, contents: StepContents, ranks: Ranks
    ) -> list[FileRecord]:
        """As `save.write_step`: on return the step is whole over all folders. What could not be
        written goes at once: it may be all that fills a disk on which others save too."""
        try:
            records = self._write_whole(prepared, contents, ranks)
        except Exception:
            if self._steps.places.is_first:
                self._remove(prepared.step)
            raise
        if self._upload is not None:
            self._upload.offer(prepared, ranks)
        if self._steps.places.is_first:
            self._prune(prepared.step)
        return records

    def _write_whole(
        self, prepared: PreparedStep, contents: StepContents, ranks: Ranks
    ) -> list[FileRecord]:
        records = write_step(prepared, contents, ranks)  # documents and manifest: at the first rank
        places = self._steps.places
        if len(places.firsts) > 1:
            told = ranks.gather(lambda: read_documents(prepared.url) if ranks.rank == 0 else {})
            mine = places.is_first and ranks.rank != 0
            ranks.gather(lambda: write_documents(prepared.url, told[0]) if mine else None)
        return records

    def _prune(self, newest: int) -> None:
        there = [step for step in self._there() if step <= newest]
        read = self._upload.pinned if self._upload is not None else None
        kept = {*there[-self._keep_last :], read}
        for step in there:
            if step not in kept:
                self._remove(step)

    def _remove(self, step: int) -> None:
        try:
            remove_step(self._steps.root_url, step)
        except (TrainyardError, OSError) as error:  # room is lost, not a step
            log.warning("step %d could not be removed: %s", step, error)

    def _there(self) -> list[int]:
        names = {path.split("/")[0] for path in store.list_files(self._steps.root_url)}
        return sorted(step for name in names if (step := step_of(name)) is not None)
