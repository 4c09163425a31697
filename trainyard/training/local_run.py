"""A pretraining in the calling program (`pretrain`): the program as host, and its run folder.

The folder is the one that `stages.pretrain` writes: steps with manifests, the whole ledger,
timings, and a manifest when the run is finished. One process at a time writes to it, under the same
claim as a stage."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.claim import Claim, acquire
from trainyard.artifacts.conditional import require_conditions
from trainyard.artifacts.digest import digest_document
from trainyard.artifacts.inputs import Input
from trainyard.artifacts.manifest import (
    InputRecord,
    Manifest,
    PartRecord,
    publish,
    read_slot,
    retire,
)
from trainyard.artifacts.store import FileRecord, OutputFile
from trainyard.artifacts.urls import join
from trainyard.config import digest_relevant
from trainyard.errors import ConfigError, InfrastructureError
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.run.run_folder import RunFolder
from trainyard.training.run.run_steps import (
    find_own_steps,
    log_found_steps,
    refuse_strangers,
    skip_damaged,
)
from trainyard.version import VERSION

STAGE = "pretrain"
STOPPING = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask to save and stop; a notebook handles SIGINT itself."""

UNFINISHED = "unfinished"
"""Key of a remembered document: the files that an unfinished attempt wrote."""


class LocalRunHost:
    """The calling program as host of the run; on every rank."""

    name = STAGE

    def __init__(self, config: PretrainConfig, inputs: Mapping[str, Input], lineage: str) -> None:
        self._config, self._inputs = config, inputs
        self.lineage = lineage
        self.input_digests = {name: found.digest for name, found in inputs.items()}
        self.stop_requested = False
        self.folder: LocalRunFolder | None = None
        """On rank 0, once it is open."""

    def defer_signals(self) -> None:
        """Signals are deferred from the start (`handle_signals`)."""

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Signals in this context ask to save and stop. Only the main thread may set handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in STOPPING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.stop_requested = True

    def run_folder(self) -> LocalRunFolder:
        """Take the claim and open the run folder; on rank 0."""
        self.folder = LocalRunFolder(self._config, self._inputs, self.lineage)
        return self.folder

    def close(self) -> None:
        """Release the claim."""
        if self.folder is not None:
            self.folder.close()

    def end_process(self, error: InfrastructureError) -> None:
        """Exit at once: destructors would wait for ranks that hang."""
        os.write(2, f"{error}\n".encode())
        os._exit(error.exit_status)


class LocalRunFolder(RunFolder):
    """The folder of --save, under a claim."""

    def __init__(self, config: PretrainConfig, inputs: Mapping[str, Input], lineage: str) -> None:
        output = config.output()
        assert output is not None, "a run without --save opens no folder"
        super().__init__(output, join(output.work_url, lineage[:12]), lineage)
        self._config, self._inputs = config, inputs
        path = store.local_path(self._url)
        if path is not None and path.exists() and not path.is_dir():
            raise ConfigError(
                f"save={self._url}: this is a file; a run is a folder, choose another"
            )
        refuse_strangers(self._url)
        require_conditions(self._url)
        self._claim: Claim | None = acquire(output.claim_url, 0.0)
        self._records: dict[str, FileRecord] = {}
        self._parts: dict[str, PartRecord] = {}
        self._slot = read_slot(output.manifest_url)
        own = find_own_steps(self._url, lineage)
        self.found = skip_damaged(own, self._url, config.verify_checkpoint)
        log_found_steps(self.found, self._url)

    def close(self) -> None:
        """Release the claim."""
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def make_room(self) -> None:
        """As for every run, but only while the claim is ours."""
        self._check_claim()
        super().make_room()

    def _retire_manifest(self) -> None:
        if self._slot is not None:
            self._slot = retire(self._output.manifest_url, self._slot, self._lineage)

    def write_unfinished(self, name: str, document: Any) -> bool:
        """As for every run; a later attempt that does not write the file removes it."""
        self._check_claim()
        if not super().write_unfinished(name, document):
            return False
        self.remember(UNFINISHED, {"files": [name]})
        return True

    def finish(self) -> None:
        """As for every run; first removes files of earlier attempts that this one did not write."""
        for name in (self.remembered(UNFINISHED) or {"files": []})["files"]:
            if name not in self._records:
                store.delete(self._output.file_url(name))
        super().finish()

    def publish(self, metrics: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        """Write the manifest, last."""
        self._check_claim()
        options = digest_relevant(self._config)
        manifest = Manifest(
            stage=STAGE,
            lineage=self._lineage,
            code={"version": VERSION, "digest": "called as a library"},
            config=options,
            config_digest=digest_document(options),
            inputs={n: InputRecord(i.urls, i.digest) for n, i in self._inputs.items()},
            files=tuple(self._records[path] for path in sorted(self._records)),
            parts=tuple(self._parts[path] for path in sorted(self._parts)),
            metrics=dict(metrics),
            run=dict(run),
        )
        slot = read_slot(self._output.manifest_url)
        publish(self._output.manifest_url, manifest, slot.version if slot else None)
        store.delete_tree(self._output.work_url)

    @contextmanager
    def _open(self, name: str, volatile: bool = False) -> Iterator[OutputFile]:
        with store.open_output(self._output.file_url(name), name, volatile) as file:
            yield file
        self._record(file.record)

    def _record(self, record: FileRecord) -> None:
        self._records[record.path] = record

    def _record_part(self, part: PartRecord) -> None:
        self._parts[part.path] = part

    def _check_claim(self) -> None:
        if self._claim is not None:
            self._claim.check()
