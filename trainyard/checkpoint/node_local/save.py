"""Saves steps into node-local folders (see `steps`), and copies them to the run folder.

Each rank writes its share of the tensor files on its node. When all shares are complete, the
documents and the manifest are written to every folder, and then older steps are removed: after the
first save, some step is always complete over all folders.

A step is copied to the run folder during training: each rank copies its files, rank 0 the documents
and, when all files match the published ones, the manifest. Until then the run folder does not have
the step. One step is copied at a time; a copy that is no longer needed is aborted and removed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest, ManifestSlot, read_manifest
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.store import FileRecord, SourceFile
from trainyard.artifacts.urls import basename, join
from trainyard.checkpoint.background import SaveReport
from trainyard.checkpoint.layout import LocalTensors
from trainyard.checkpoint.node_local.steps import LocalSteps, read_documents, write_documents
from trainyard.checkpoint.ranks import Ranks
from trainyard.checkpoint.save import PreparedStep, StepContents, prepare_step, write_step
from trainyard.checkpoint.steps import clear_step, publish_step, remove_step, step_of
from trainyard.errors import ArtifactError, TrainyardError

Done = Callable[[list[FileRecord], SaveReport], object]
"""Called on the first rank after a step was copied."""


class _NotWantedError(Exception):
    """Aborts the copy."""


class LazyUpload:
    """Copies one step at a time in a thread, on every rank."""

    def __init__(self, root_url: str, lineage: str, ranks: Ranks, done: Done) -> None:
        """root_url: the run folder. ranks: with a group that is used for nothing else."""
        self._root_url, self._lineage, self._ranks, self._done = root_url, lineage, ranks, done
        self._thread: threading.Thread | None = None
        self._unwanted = threading.Event()
        self._is_closed = False
        self._step: int | None = None
        self._newest = 0
        """The newest step saved directly to the run folder."""

    @property
    def pinned(self) -> int | None:
        """The step that is being copied."""
        return self._step if self._thread is not None and self._thread.is_alive() else None

    def offer(self, prepared: PreparedStep, ranks: Ranks) -> None:
        """Copy a step that is complete in all folders, unless a copy runs on any rank. All ranks
        call this; ranks: for use in the caller's thread."""

        def is_free() -> bool:
            return self.pinned is None and not self._is_closed and prepared.step > self._newest

        if all(ranks.gather(is_free)):
            self._start(prepared)

    def _start(self, prepared: PreparedStep) -> None:
        names = [file.name for file in prepared.planned if file.writer == self._ranks.rank]
        began = time.monotonic()
        self._unwanted.clear()
        self._step = prepared.step
        if self._step <= self._newest:  # a newer step was saved while the ranks agreed
            self._unwanted.set()

        def work() -> None:
            try:
                report = self._copy(prepared, names, began)
            except (TrainyardError, OSError) as error:
                log.warning(
                    "could not copy step %d to %s, training continues: %s",
                    *(prepared.step, self._root_url, error),
                )
                return
            if report is None and self._ranks.rank == 0:
                log.info("stopped copying step %d to %s", prepared.step, self._root_url)

        self._thread = threading.Thread(target=work, name="lazy upload", daemon=True)
        self._thread.start()

    def overtake(self, step: int) -> None:
        """The run folder has this step: abort the copy of an earlier one."""
        self._newest = step
        if self._step is not None and self._step <= step:
            self._unwanted.set()

    def close(self) -> None:
        """Abort the current copy, and start no other."""
        self._is_closed = True
        self._unwanted.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # --- in the thread ------------------------------------------------------------------------

    def _copy(
        self, prepared: PreparedStep, names: Sequence[str], began: float
    ) -> SaveReport | None:
        """The report of the copy; None if it was aborted."""
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
        self, source: str, target: str, files: Sequence[FileRecord], slot: ManifestSlot | None
    ) -> list[FileRecord]:
        found = read_manifest(join(source, MANIFEST))
        if found is None:
            raise ArtifactError(f"{source}: its {MANIFEST} is missing")
        manifest: Manifest = found[0]
        records = list(files)
        for name, data in read_documents(source).items():
            if name != MANIFEST:
                records.append(store.write_bytes(join(target, name), data, name))
        published = {record.path: record for record in manifest.files}
        for record in records:
            if record != published.pop(record.path, None):
                raise ArtifactError(
                    f"{join(source, record.path)}: changed since it was saved: its digest is "
                    f"{record.digest}"
                )
        if published:
            raise ArtifactError(f"{source}: no rank wrote {next(iter(published))}")
        return publish_step(target, manifest, slot)


log = logging.getLogger(__name__)


class LocalSave:
    """Writes steps of one run, on every rank."""

    def __init__(
        self,
        steps: LocalSteps,
        keep_last: int,
        upload: LazyUpload | None = None,
    ) -> None:
        """keep_last: number of steps to keep. upload: gets each complete step; the step it copies
        is kept too."""
        self._steps, self._keep_last, self._upload = steps, keep_last, upload

    @property
    def root_url(self) -> str:
        """This rank's folder."""
        return self._steps.root_url

    def prepare(
        self, step: int, tensors: Mapping[str, LocalTensors], lineage: str, ranks: Ranks
    ) -> PreparedStep:
        """As `save.prepare_step`, and clears the step in every folder."""
        root = self._steps.root_url

        def clear() -> None:
            if self._steps.visibility.is_first:
                remove_step(root, step)
                for later in self._steps_here():
                    if later > step:  # of an earlier attempt
                        remove_step(root, later)

        ranks.gather(clear)
        if ranks.places is not None:  # ranks of a host may have folders of their own
            ranks = replace(ranks, places=self._steps.visibility.within(ranks.places))
        return prepare_step(root, step, tensors, lineage, ranks)

    def write(
        self, prepared: PreparedStep, contents: StepContents, ranks: Ranks
    ) -> list[FileRecord]:
        """As `save.write_step`: on return the step is complete over all folders. Removes a failed
        step at once, as it may fill a disk on which other runs save."""
        try:
            records = self._write_all(prepared, contents, ranks)
        except Exception:
            if self._steps.visibility.is_first:
                self._remove(prepared.step)
            raise
        if self._upload is not None:
            self._upload.offer(prepared, ranks)
        if self._steps.visibility.is_first:
            self._prune(prepared.step)
        return records

    def _write_all(
        self, prepared: PreparedStep, contents: StepContents, ranks: Ranks
    ) -> list[FileRecord]:
        records = write_step(prepared, contents, ranks)  # documents only at the first rank
        visibility = self._steps.visibility
        if len(visibility.firsts) > 1:
            sent = ranks.share(lambda: read_documents(prepared.url), 0)
            mine = visibility.is_first and ranks.rank != 0
            ranks.gather(lambda: write_documents(prepared.url, sent) if mine else None)
        return records

    def _prune(self, newest: int) -> None:
        here = [step for step in self._steps_here() if step <= newest]
        copied = self._upload.pinned if self._upload is not None else None
        kept = {*here[-self._keep_last :], copied}
        for step in here:
            if step not in kept:
                self._remove(step)

    def _remove(self, step: int) -> None:
        try:
            remove_step(self._steps.root_url, step)
        except (TrainyardError, OSError) as error:  # loses disk space, not a step
            log.warning("could not remove step %d: %s", step, error)

    def _steps_here(self) -> list[int]:
        names = {path.split("/")[0] for path in store.list_files(self._steps.root_url)}
        return sorted(step for name in names if (step := step_of(name)) is not None)
