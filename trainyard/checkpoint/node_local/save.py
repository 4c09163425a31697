"""Saving a step into the folders of several nodes (see `local_steps`), the newest few kept.

Each rank writes its share of the tensor files where it is. When all shares are whole the documents
and the manifest go to every folder, and when these are there older steps go: at any moment some
step is whole over all folders, once one was."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from trainyard.artifacts import store
from trainyard.artifacts.store import FileRecord
from trainyard.checkpoint.layout import Held
from trainyard.checkpoint.node_local.steps import LocalSteps, read_documents, write_documents
from trainyard.checkpoint.node_local.upload import LazyUpload
from trainyard.checkpoint.save import PreparedStep, Ranks, StepContents, prepare_step, write_step
from trainyard.checkpoint.steps import remove_step, step_of
from trainyard.errors import TrainyardError

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
