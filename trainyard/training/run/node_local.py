"""Non-persistent steps: the steps of a run outside its folder, and the one to resume from.

A token in the run folder marks the run and names the folders of these steps. So a run that starts
over never resumes from the steps that another run left on a node:

    SAVE/non_persistent.json   {"format_version": 1, "lineage": "...", "token": "..."}
    PLACE/TOKEN/run.json       {"format_version": 1, "save": "SAVE"}, and the steps"""

from __future__ import annotations

import json
import logging
import os
import re
import uuid
from dataclasses import dataclass
from typing import Any

from trainyard import json_text
from trainyard.artifacts import store
from trainyard.artifacts.lines import read_lines
from trainyard.artifacts.urls import canonical, join
from trainyard.checkpoint.node_local.steps import LocalStep, LocalSteps
from trainyard.checkpoint.node_local.visibility import find_visibility, visible_to_all
from trainyard.checkpoint.ranks import Ranks
from trainyard.checkpoint.steps import STATE, step_document, step_folder
from trainyard.checkpoint.stored_step import Verify
from trainyard.errors import ArtifactError, ConfigError
from trainyard.parallel.groups import ProcessGroups
from trainyard.training.loop.ledger import FILE as LEDGER
from trainyard.training.options.node_local import NonPersistentConfig
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.run.run_steps import FoundSteps
from trainyard.training.run.step_ledgers import ledger_fault
from trainyard.variables import variable

log = logging.getLogger(__name__)

MARK = "non_persistent.json"
RUN = "run.json"
FORMAT_VERSION = 1

MAX_PATH = 4096
"""The limit of Linux. Longer paths would cost much: expandvars takes quadratic time."""

VARIABLE = re.compile(r"\$(\w+|\{[^{}]*\})")


@dataclass(frozen=True, slots=True)
class NonPersistentStep:
    """A step outside the run folder, to resume from."""

    root_url: str
    """The folder of this rank's part."""
    found: LocalStep
    last_staying: int
    """Newest permanent step of the run folder, 0 without one; its ledger ends there."""
    description: str
    """For the log."""

    @property
    def url(self) -> str:
        """Folder of the step."""
        return join(self.root_url, step_folder(self.found.step))


class NonPersistentSteps:
    """The non-persistent steps of one run; all ranks call it together."""

    def __init__(self, config: NonPersistentConfig, save: str, lineage: str, ranks: Ranks) -> None:
        folder = config.folder(save)
        assert folder is not None
        self._save, self._lineage, self._ranks = save, lineage, ranks
        self.is_local = config.non_persistent_ckpt_type == "local"
        self._mark_url = join(save, MARK)
        shared = ranks.gather(self._token if ranks.rank == 0 else lambda: None)[0]
        assert shared is not None
        token, self._is_new = shared
        self._root = expanded(folder) if self.is_local else folder
        self.root_url = join(self._root, token)
        visibility = (
            find_visibility(self.root_url, ranks) if self.is_local else visible_to_all(ranks)
        )
        self.steps = LocalSteps(self.root_url, lineage, visibility, ranks)

    def _token(self) -> tuple[str, bool]:
        """(token, whether it is new)."""
        if store.exists(self._mark_url):
            found = store.read_json(self._mark_url)
            if isinstance(found, dict) and found.get("lineage") == self._lineage:
                return _plain(found.get("token"), self._mark_url), False
        return uuid.uuid4().hex[:16], True

    def find(self, found: FoundSteps, verify: Verify) -> NonPersistentStep | None:
        """The step to resume from, unless the run folder has a newer one."""
        if self._is_new:
            return None
        step = self.steps.find(
            found.latest or 1, verify, lambda url: _refusal(url, found, self._save)
        )
        if step is None:
            return None
        kind = "node-local" if self.is_local else "global non-persistent"
        last = "has none" if found.latest is None else f"has step {found.latest}"
        folders = self.steps.visibility.description
        description = (
            f"{kind} step {step.step} ({folders}: {self.root_url}; whole, "
            f"{VERIFIED[verify]}); {self._save} {last}"
        )
        return NonPersistentStep(self.root_url, step, max(found.staying, default=0), description)

    def claim(self) -> None:
        """Before the first save: mark the run, and remove the steps that earlier runs of this
        folder left."""

        def mark() -> None:
            if self._ranks.rank == 0 and self._is_new:
                token = store.basename(self.root_url)
                _write(self._mark_url, {"lineage": self._lineage, "token": token})
            if self.steps.visibility.is_first:
                _write(join(self.root_url, RUN), {"save": canonical(self._save)})
                self._remove_older()

        self._ranks.gather(mark)
        self._is_new = False

    def _remove_older(self) -> None:
        ours = store.basename(self.root_url)
        folders = {path.split("/")[0] for path in store.list_files(self._root) if "/" in path}
        for folder in sorted(folders - {ours}):
            url = join(self._root, folder, RUN)
            try:
                document = store.read_json(url) if store.exists(url) else None
            except ArtifactError:
                continue
            if isinstance(document, dict) and document.get("save") == canonical(self._save):
                log.info("removing %s of an earlier run in %s", store.parent(url), self._save)
                store.delete_tree(store.parent(url))

    def remove(self) -> None:
        """Remove all: the run is finished, and its folder has its steps."""
        if self._is_new:
            return
        self.steps.remove()
        if self._ranks.rank == 0:
            store.delete(self._mark_url)


def find_non_persistent(
    config: PretrainConfig, lineage: str, groups: ProcessGroups, found: FoundSteps
) -> tuple[NonPersistentSteps | None, NonPersistentStep | None]:
    """The non-persistent steps of a run, if the options ask for them; the one to resume from, if it
    is newer than the steps of the folder."""
    if config.non_persistent.non_persistent_save_interval is None:
        return None, None
    ranks = Ranks(groups.world, groups.rank, groups.dims.world_size)
    steps = NonPersistentSteps(config.non_persistent, config.run_folder, lineage, ranks)
    return steps, steps.find(found, config.verify_checkpoint)


VERIFIED: dict[Verify, str] = {
    "none": "sizes compared",
    "sizes": "sizes compared",
    "digests": "digests compared",
}


def expanded(folder: str) -> str:
    """A folder of this node, with its variables expanded."""
    if len(folder) > MAX_PATH:
        raise ConfigError(f"--non-persistent-local-ckpt-dir has more than {MAX_PATH} characters")
    for found in VARIABLE.finditer(folder):
        variable(found[1].strip("{}"), os.environ, f"--non-persistent-local-ckpt-dir {folder}")
    path = os.path.expanduser(os.path.expandvars(folder))
    unset = VARIABLE.search(path)
    if unset is not None:
        raise ConfigError(
            f"--non-persistent-local-ckpt-dir {folder}: {unset[0]} is not set on the node of rank "
            f"{os.environ.get('RANK', '0')}"
        )
    if store.local_path(path) is None:
        raise ConfigError(
            f"--non-persistent-local-ckpt-dir {folder}: not a local folder; for an object store "
            "give --non-persistent-ckpt-type global"
        )
    return path


def _refusal(url: str, found: FoundSteps, save: str) -> str | None:
    """Why a run with these steps cannot resume from the step at a URL; None if it can."""
    fault = ledger_fault(url)
    if fault:
        return f"damaged: {fault}"
    line = next(read_lines(join(url, LEDGER)), None)
    first = step_document(url, STATE)["step"] + 1 if line is None else json_text.loads(line)["step"]
    begins = int(first)
    last = max(found.staying, default=0)
    is_known = bool(found.staying or found.damaged)
    if is_known and begins > last + 1:
        return (
            f"its ledger starts at step {begins}, but the last step of {save} is {last}: the steps "
            "between are gone"
        )
    return None


def _plain(token: Any, url: str) -> str:
    if not isinstance(token, str) or not re.fullmatch("[0-9a-f]{16}", token):
        raise ArtifactError(
            f"{url}: not a mark of a run; remove it to resume without non-persistent steps"
        )
    return token


def _write(url: str, document: dict[str, str]) -> None:
    store.write_bytes(url, json.dumps({"format_version": FORMAT_VERSION, **document}).encode())
