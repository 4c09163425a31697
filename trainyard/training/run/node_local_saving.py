"""Non-persistent saves: between those of the run folder, on nodes or in another shared folder.

A failed save, such as on a full disk, logs a warning and training continues: the run folder has an
older step. With asynchronous saves training waits only for a copy to host memory of its own.

An upload stops once the run folder has a newer step. A step that is being written is still
completed: it costs little, only the next non-persistent save waits for it, and the run falls back
to it if the newer step is damaged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeAlias

import torch
from torch import Tensor

from trainyard.artifacts.store import FileRecord
from trainyard.checkpoint.background import BackgroundSave, Kind, SaveReport
from trainyard.checkpoint.layout import LocalTensors
from trainyard.checkpoint.node_local.save import LazyUpload, LocalSave
from trainyard.checkpoint.plan import Slice
from trainyard.checkpoint.ranks import Ranks
from trainyard.checkpoint.save import StepContents
from trainyard.errors import TrainyardError
from trainyard.parallel.groups import ProcessGroups, host_group
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.run.node_local import NonPersistentSteps

log = logging.getLogger(__name__)


Done: TypeAlias = Callable[[list[FileRecord], SaveReport], object]
"""Called on rank 0 with each step that is published in the run folder."""


@dataclass(frozen=True, slots=True)
class NonPersistentPlan:
    """When and how non-persistent steps are saved."""

    interval: int
    saving: LocalSave
    kind: Kind
    claim: Callable[[], None]
    """Called on every rank before the first save."""
    background: BackgroundSave | None = None
    """Writes them; None: training waits."""
    upload: LazyUpload | None = None
    """Copies them to the run folder; None: no copies."""


class NonPersistentSaves:
    """Saves on all ranks together."""

    def __init__(
        self, plan: NonPersistentPlan, ranks: Ranks, report: Callable[[SaveReport, str], object]
    ) -> None:
        """ranks: of training. report: called on rank 0 with each save and its folder."""
        self._plan, self._ranks, self._report = plan, ranks, report
        self._claim: Callable[[], None] | None = plan.claim

    def is_due(self, step: int) -> bool:
        """Whether a step is due, unless the run folder gets it."""
        return step % self._plan.interval == 0

    @property
    def needs_room(self) -> bool:
        """Whether these saves also write steps of the run folder."""
        return self._plan.upload is not None

    def wait_for_saves(self) -> None:
        """Let training wait for them from now on; none may have started."""
        self._plan = replace(self._plan, background=None)

    def reserve(self, share: Mapping[Slice, Tensor]) -> None:
        """Allocate host memory for the share of this rank now."""
        if self._plan.background is not None:
            self._plan.background.reserve(share)

    def hold_update(self) -> None:
        """Wait for copies of the parameters before they change."""
        if self._plan.background is not None:
            self._plan.background.hold_update()

    def check(self) -> None:
        """Log saves that failed since the last call."""
        background = self._plan.background
        if background is not None:
            self._try(background.check)

    def save(self, step: int, tensors: dict[str, LocalTensors], contents: StepContents) -> None:
        """Save, or start a save in the background."""
        self._try(lambda: self._save(step, tensors, contents))

    def _save(self, step: int, tensors: dict[str, LocalTensors], contents: StepContents) -> None:
        began = time.monotonic()
        background, saving = self._plan.background, self._plan.saving
        if background is not None:
            self._try(background.finish)
        if self._claim is not None:
            self._claim()
            self._claim = None
        prepared = saving.prepare(step, tensors, contents.lineage, self._ranks)
        if background is not None:
            background.start(prepared, contents, began, self._done)
            return
        records = saving.write(prepared, contents, self._ranks)
        seconds = time.monotonic() - began
        size = sum(record.size_bytes for record in records)
        self._done(records, SaveReport(step, size, seconds, seconds, self._plan.kind))

    def _done(self, records: list[FileRecord], report: SaveReport) -> None:
        if self._ranks.rank == 0:
            self._report(report, self._plan.saving.root_url)

    def overtake(self, step: int) -> None:
        """The run folder has this step: cancel the copies of older ones."""
        if self._plan.upload is not None:
            self._plan.upload.overtake(step)

    def finish(self) -> None:
        """Complete the save that is being written, and cancel copies: the run folder has the last
        step."""
        if self._plan.background is not None:
            self._try(self._plan.background.finish)
        if self._plan.upload is not None:
            self._plan.upload.close()

    def give_up(self, seconds: float) -> None:
        """Wait at most so long for the save that is being written: training has failed."""
        if self._plan.background is not None:
            self._plan.background.give_up(seconds)

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except (TrainyardError, OSError) as error:
            log.warning("non-persistent save failed, training continues: %s", error)


# --- from options -----------------------------------------------------------------------------


def may_be_asynchronous(config: PretrainConfig, device: torch.device) -> bool:
    """Whether training may go on while steps are written.

    By default only on GPUs: on CPUs the writer's threads would take the cores from training, and
    the copies memory from the model."""
    asked = config.training.async_save
    return device.type == "cuda" and _saves_between(config) if asked is None else asked


def _saves_between(config: PretrainConfig) -> bool:
    """Whether steps are saved before the last, for which a run always waits."""
    intervals = (
        config.training.save_interval,
        config.non_persistent.non_persistent_save_interval,
    )
    return any(interval is not None for interval in intervals)


def build_background(
    config: PretrainConfig, groups: ProcessGroups, device: torch.device
) -> BackgroundSave | None:
    """The writer of steps of the run folder while training runs."""
    if not may_be_asynchronous(config, device):
        return None
    return BackgroundSave(_own_ranks(config, groups))


def build_non_persistent(
    config: PretrainConfig,
    groups: ProcessGroups,
    lineage: str,
    steps: NonPersistentSteps,
    device: torch.device,
    done: Done,
) -> NonPersistentPlan:
    """The saves outside the run folder. All ranks call it alike."""
    options = config.non_persistent
    assert options.non_persistent_save_interval is not None
    upload = None
    if options.non_persistent_upload:
        upload = LazyUpload(config.run_folder, lineage, _own_ranks(config, groups), done)
    saving = LocalSave(steps.steps, options.non_persistent_keep_last, upload)
    kind: Kind = "local" if steps.is_local else "global"
    background = None
    if may_be_asynchronous(config, device):
        background = BackgroundSave(_own_ranks(config, groups), saving.write, kind)
    return NonPersistentPlan(
        options.non_persistent_save_interval, saving, kind, steps.claim, background, upload
    )


def _own_ranks(config: PretrainConfig, groups: ProcessGroups) -> Ranks:
    """A process group of its own, as every thread that communicates needs one."""
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    return Ranks(host_group(groups, timeout), groups.rank, groups.dims.world_size)
