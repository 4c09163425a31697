"""The run folder of a pretraining: which of its steps are ours, making room, and listing it at the
end."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from stages.pretrain.reached import Reached
from stages.runtime.context import StageRun
from stages.runtime.failure import add_step, report_failure
from trainyard.artifacts import store
from trainyard.artifacts.manifest import read_manifest
from trainyard.checkpoint.background import SaveReport
from trainyard.checkpoint.stored_step import Verify
from trainyard.errors import InfrastructureError
from trainyard.training.loop.ledger import FILE as LEDGER
from trainyard.training.loop.throughput import FILE as TIMINGS
from trainyard.training.run.documents import SAVES, keep_save, kept_saves
from trainyard.training.run.run_steps import (
    FoundSteps,
    announce,
    find_own_steps,
    finished_steps,
    pass_over_damaged,
    refuse_strangers,
    remove_all_but,
    set_aside,
)

log = logging.getLogger(__name__)

SUPERSEDED = "superseded"
"""Work unit: the steps that a finished run of the same options left, when they are made anew."""


class StageHost:
    """A stage as the training sees it; on every rank."""

    def __init__(self, stage: StageRun, verify: Verify, reached: Reached) -> None:
        """verify: how closely steps are looked at before one is continued."""
        self._stage, self._verify, self._reached = stage, verify, reached
        self.name, self.lineage = stage.name, stage.lineage
        self.input_digests = {name: found.digest for name, found in stage.inputs.items()}

    @property
    def stop_requested(self) -> bool:
        """A signal came."""
        return self._stage.stop_requested

    def defer_signals(self) -> None:
        """The first one only asks to stop."""
        self._stage.defer_signals()

    def keeper(self) -> StageRunFolder:
        """On rank 0."""
        return StageRunFolder(self._stage, self._verify)

    def end_process(self, error: InfrastructureError) -> None:
        """At once: destructors would wait for ranks that do not come."""
        add_step(error, self._reached.step)
        os._exit(report_failure(self.name, error, debug=False))


class StageRunFolder:
    """Keeps the folder of one run in order; on rank 0 alone."""

    def __init__(self, stage: StageRun, verify: Verify) -> None:
        assert stage.output is not None
        self._stage = stage
        self._url = stage.output.url
        refuse_strangers(self._url)
        self._anew = self._is_made_anew()
        found = find_own_steps(self._url, stage.lineage)
        if self._anew:
            self.found = FoundSteps(foreign=_all(found))
            return
        self.found = pass_over_damaged(found, self._url, verify)
        announce(self.found, self._url)

    def _is_made_anew(self) -> bool:
        """A finished run is made again whole (--force, other code); an unfinished one is continued.

        Steps removed by hand do not make a run unfinished work of another kind: it continues from
        what is left."""
        pending = self._stage.work.published(SUPERSEDED)
        if pending is not None:
            return bool(pending["steps"])
        assert self._stage.output is not None
        finished = read_manifest(self._stage.output.manifest_url)
        if finished is None or finished[0].lineage != self._stage.lineage:
            return False
        sizes = store.list_files(self._url)
        return all(sizes.get(file.path) == file.size_bytes for file in finished[0].files)

    def make_room(self) -> None:
        """Before the first save: other runs' steps are set aside, torn ones go, the old manifest
        stops being one.

        Killed in between and run again, a run that is made anew still is."""
        if self._anew:
            self._stage.work.publish(SUPERSEDED, {"steps": list(self.found.foreign)})
        set_aside(self._url, self.found.foreign + self.found.damaged)
        remove_all_but(self._url, self.found.staying + self.found.passing)
        if self._anew:
            self._stage.work.publish(SUPERSEDED, {"steps": []})
        self._stage.begin_replacing()

    def keep_timings(self, step: int, lines: list[str]) -> None:
        """Timings up to a step, kept over kills."""
        with self._stage.work.open(f"timings-{step:07d}.jsonl") as file:
            file.write("".join(line + "\n" for line in lines).encode())

    def keep_save(self, report: SaveReport) -> None:
        """What a save cost, kept over kills."""
        keep_save(store.parent(self._stage.work.url(SAVES)), report)

    def remembered(self, key: str) -> dict[str, Any] | None:
        """What an earlier attempt at this run left under a name."""
        return self._stage.work.published(key)

    def remember(self, key: str, document: Mapping[str, Any]) -> None:
        """Leave something for the next attempt."""
        self._stage.work.publish(key, document)

    def write_volatile(self, name: str, document: Any) -> None:
        """A document that is listed, and no part of what the run makes."""
        self._stage.write_json(name, document, volatile=True)

    def write_unfinished(self, name: str, document: Any) -> bool:
        """The same of a run that is not done; not over what a finished one left."""
        assert self._stage.output is not None
        if read_manifest(self._stage.output.manifest_url) is not None:
            return False
        self.write_volatile(name, document)
        return True

    def finish(self) -> bytes:
        """List every step that stays, write the whole ledger and the timings; returns the
        ledger."""
        passed_over = self.found.damaged
        records, ledger = finished_steps(self._url, self._stage.lineage, passed_over)
        for record in records:
            self._stage.record(record)
        self._stage.write_bytes(LEDGER, ledger)
        self._stage.write_bytes(TIMINGS, self._timings(), volatile=True)
        saves = kept_saves(store.parent(self._stage.work.url(SAVES)))
        self._stage.write_bytes(SAVES, saves, volatile=True)
        return ledger

    def _timings(self) -> bytes:
        root = store.parent(self._stage.work.url(TIMINGS))
        names = [name for name in store.list_files(root) if name.startswith("timings-")]
        return b"".join(store.read_bytes(self._stage.work.url(name)) for name in sorted(names))


def _all(found: FoundSteps) -> tuple[int, ...]:
    return tuple(sorted(found.staying + found.passing + found.foreign + found.damaged))
