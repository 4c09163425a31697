"""The run folder of a pretraining stage, and the stage as the host of the run."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

from stages.pretrain.config import PretrainConfig
from stages.pretrain.progress_file import ProgressFile
from stages.runtime.context import StageRun
from stages.runtime.failure import add_step, report_failure
from trainyard.artifacts import store
from trainyard.artifacts.manifest import PartRecord, read_manifest
from trainyard.artifacts.parts import wrong_file
from trainyard.artifacts.store import FileRecord, OutputFile
from trainyard.config import digest_relevant
from trainyard.errors import InfrastructureError
from trainyard.training.run.run_folder import RunFolder
from trainyard.training.run.run_steps import (
    FoundSteps,
    find_own_steps,
    log_found_steps,
    refuse_strangers,
    skip_damaged,
)

SUPERSEDED = "superseded"
"""Work unit: the steps of a finished run with the same options, when that run starts over."""


class StageHost:
    """The stage as the host of a run; on every rank."""

    def __init__(self, stage: StageRun, config: PretrainConfig, progress: ProgressFile) -> None:
        self._stage, self._config, self._progress = stage, config, progress
        self.name, self.lineage = stage.name, stage.lineage
        self.input_digests = {name: found.digest for name, found in stage.inputs.items()}

    @property
    def stop_requested(self) -> bool:
        """True after the first stop signal."""
        return self._stage.stop_requested

    def defer_signals(self) -> None:
        """From now on the first stop signal only sets `stop_requested`."""
        self._stage.defer_signals()

    def run_folder(self) -> StageRunFolder:
        """Open the run folder; on rank 0."""
        return StageRunFolder(self._stage, self._config)

    def end_process(self, error: InfrastructureError) -> None:
        """Exit at once: destructors would wait for ranks that hang."""
        add_step(error, self._progress.step)
        os._exit(report_failure(self.name, error, debug=False))


class StageRunFolder(RunFolder):
    """The output of the stage."""

    def __init__(self, stage: StageRun, config: PretrainConfig) -> None:
        assert stage.output is not None
        super().__init__(stage.output, store.parent(stage.work.url("unit")), stage.lineage)
        self._stage = stage
        refuse_strangers(self._url)
        self._starts_over = self._must_start_over(digest_relevant(config))
        found = find_own_steps(self._url, stage.lineage)
        if self._starts_over:
            steps = found.staying + found.passing + found.foreign + found.damaged
            self.found = FoundSteps(foreign=tuple(sorted(steps)))
            return
        self.found = skip_damaged(found, self._url, config.verify_checkpoint)
        log_found_steps(self.found, self._url)

    def _must_start_over(self, options: dict[str, Any]) -> bool:
        """A finished run starts over (--force, --on-code-change redo); an unfinished one resumes,
        and a finished one goes on under other options.

        A run whose files someone removed resumes from the steps that are left."""
        pending = self._stage.work.published(SUPERSEDED)
        if pending is not None:
            return bool(pending["steps"])
        finished = read_manifest(self._output.manifest_url)
        if finished is None or finished[0].lineage != self._stage.lineage:
            return False
        if finished[0].config != options and not self._stage.is_forced:
            return False
        return wrong_file(self._url, finished[0], store.list_files(self._url)) is None

    def make_room(self) -> None:
        """As for every run. A run that starts over and is killed here starts over again."""
        if self._starts_over:
            self.remember(SUPERSEDED, {"steps": list(self.found.foreign)})
        super().make_room()
        if self._starts_over:
            self.remember(SUPERSEDED, {"steps": []})

    def _open(self, name: str, volatile: bool = False) -> AbstractContextManager[OutputFile]:
        return self._stage.open(name, volatile)

    def _record(self, record: FileRecord) -> None:
        self._stage.record(record)

    def _record_part(self, part: PartRecord) -> None:
        self._stage.record_part(part)

    def _retire_manifest(self) -> None:
        self._stage.begin_replacing()
