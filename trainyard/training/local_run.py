"""The run folder of a pretraining that a program calls (`pretrain`), and that program as its host.

The folder is the one that `stages.pretrain` makes: steps with manifests, the whole ledger, timings,
and a manifest of its own when the run is finished. What outlives a killed run lies in its work
folder. One process at a time writes there, by the claim that stages take."""

from __future__ import annotations

import json
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
    publish,
    read_manifest,
    read_slot,
    retire,
)
from trainyard.artifacts.output import Output
from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.urls import join
from trainyard.checkpoint.background import SaveReport
from trainyard.config import digest_relevant
from trainyard.errors import ConfigError, InfrastructureError
from trainyard.training.loop.ledger import FILE as LEDGER
from trainyard.training.loop.throughput import FILE as TIMINGS
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.run.documents import SAVES, keep_save, kept_saves
from trainyard.training.run.run_steps import (
    announce,
    find_own_steps,
    finished_steps,
    pass_over_damaged,
    refuse_strangers,
    remove_all_but,
    set_aside,
)
from trainyard.version import VERSION

STAGE = "pretrain"
STOPPING = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask to save and stop; SIGINT is the notebook's own."""

UNFINISHED = "unfinished"
"""Remembered: documents that an unfinished part of the run left."""


class LocalRunHost:
    """The calling program; on every rank."""

    name = STAGE

    def __init__(self, config: PretrainConfig, inputs: Mapping[str, Input], lineage: str) -> None:
        self._config, self._inputs = config, inputs
        self.lineage = lineage
        self.input_digests = {name: found.digest for name, found in inputs.items()}
        self.stop_requested = False
        self.kept: LocalRunFolder | None = None
        """On rank 0, once it was asked for."""

    def defer_signals(self) -> None:
        """Done from the beginning (`listening`)."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A signal inside asks to save and stop. Handlers are the main thread's."""
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

    def keeper(self) -> LocalRunFolder:
        """On rank 0; takes the claim."""
        self.kept = LocalRunFolder(self._config, self._inputs, self.lineage)
        return self.kept

    def close(self) -> None:
        """Let others write."""
        if self.kept is not None:
            self.kept.close()

    def end_process(self, error: InfrastructureError) -> None:
        """At once: destructors would wait for ranks that do not come."""
        os.write(2, f"{error}\n".encode())
        os._exit(error.exit_status)


class LocalRunFolder:
    """Keeps the folder; on rank 0 alone."""

    def __init__(self, config: PretrainConfig, inputs: Mapping[str, Input], lineage: str) -> None:
        self._config, self._inputs, self._lineage = config, inputs, lineage
        self._output: Output = config.output()
        self._url = self._output.url
        if store.exists(self._url) and store.is_local(self._url) and not _is_folder(self._url):
            raise ConfigError(
                f"save={self._url}: this is a file; a run is a folder, choose another"
            )
        refuse_strangers(self._url)
        require_conditions(self._url)
        self._claim: Claim | None = acquire(self._output.claim_url, 0.0)
        self._work = join(self._output.work_url, lineage[:12])
        self._records: dict[str, FileRecord] = {}
        self._slot = read_slot(self._output.manifest_url)
        own = find_own_steps(self._url, lineage)
        self.found = pass_over_damaged(own, self._url, config.verify_checkpoint)
        announce(self.found, self._url)

    def close(self) -> None:
        """Give the claim back."""
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def make_room(self) -> None:
        """Before the first save: other runs' steps are set aside, torn ones go, and a manifest of
        what was there before stops being one."""
        self._check_claim()
        set_aside(self._url, self.found.foreign + self.found.damaged)
        remove_all_but(self._url, self.found.staying + self.found.passing)
        if self._slot is not None:
            self._slot = retire(self._output.manifest_url, self._slot, self._lineage)

    def keep_timings(self, step: int, lines: list[str]) -> None:
        """Timings up to a step, kept over kills."""
        text = "".join(line + "\n" for line in lines)
        store.write_bytes(join(self._work, f"timings-{step:07d}.jsonl"), text.encode())

    def keep_save(self, report: SaveReport) -> None:
        """What a save cost, kept over kills."""
        keep_save(self._work, report)

    def remembered(self, key: str) -> dict[str, Any] | None:
        """What an earlier attempt at this run left under a name."""
        url = join(self._work, f"{key}.unit.json")
        found: dict[str, Any] | None = store.read_json(url) if store.exists(url) else None
        return found

    def remember(self, key: str, document: Mapping[str, Any]) -> None:
        """Leave something for the next attempt."""
        store.write_bytes(join(self._work, f"{key}.unit.json"), json.dumps(document).encode())

    def write_volatile(self, name: str, document: Any) -> None:
        """A document that is listed, and no part of what the run makes."""
        text = json.dumps(document, indent=1, allow_nan=False) + "\n"
        self._write(name, text.encode(), volatile=True)

    def write_unfinished(self, name: str, document: Any) -> bool:
        """The same of a run that is not done; not over what a finished one left."""
        if read_manifest(self._output.manifest_url) is not None:
            return False
        self._check_claim()
        self.write_volatile(name, document)
        self.remember(UNFINISHED, {"files": [name]})
        return True

    def finish(self) -> bytes:
        """Write the ledger and the timings of the whole run; returns the ledger."""
        for name in (self.remembered(UNFINISHED) or {"files": []})["files"]:
            if name not in self._records:  # of an earlier part, and not asked for any more
                store.delete(self._output.file_url(name))
        records, ledger = finished_steps(self._url, self._lineage, self.found.damaged)
        self._records |= {record.path: record for record in records}
        self._write(LEDGER, ledger)
        self._write(TIMINGS, self._timings(), volatile=True)
        self._write(SAVES, self._saves(), volatile=True)
        return ledger

    def publish(self, metrics: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        """The manifest, last."""
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
            metrics=dict(metrics),
            run=dict(run),
        )
        slot = read_slot(self._output.manifest_url)
        publish(self._output.manifest_url, manifest, slot.version if slot else None)
        store.delete_tree(self._output.work_url)

    def _write(self, name: str, data: bytes, volatile: bool = False) -> None:
        url = self._output.file_url(name)
        with store.open_output(url, name, volatile) as file:
            file.write(data)
        assert file.record is not None
        self._records[name] = file.record

    def _timings(self) -> bytes:
        names = [name for name in store.list_files(self._work) if name.startswith("timings-")]
        if not names and store.exists(self._output.file_url(TIMINGS)):
            return store.read_bytes(self._output.file_url(TIMINGS))  # of a run that was finished
        return b"".join(store.read_bytes(join(self._work, name)) for name in sorted(names))

    def _saves(self) -> bytes:
        found = kept_saves(self._work)
        if not found and store.exists(self._output.file_url(SAVES)):
            return store.read_bytes(self._output.file_url(SAVES))  # of a run that was finished
        return found

    def _check_claim(self) -> None:
        if self._claim is not None:
            self._claim.check()


def _is_folder(url: str) -> bool:
    path = store.local_path(url)
    return path is None or path.is_dir()
