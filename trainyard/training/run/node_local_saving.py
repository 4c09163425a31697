"""Saves between those of the run folder: in folders of nodes, or in another one for all.

What fails here, a full disk too, is warned of, and training goes on: the run folder has what there
is to fall back to. With --async-save training waits for a copy to host memory only, which is memory
of its own.

Where the run folder has got a newer step meanwhile, a copy to it is broken off. What is still being
written in the other place becomes whole nevertheless: little is left of it by then, no other save
waits for it but the next one here, and should the newer step turn out damaged it is the nearest."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

from torch import Tensor

from trainyard.artifacts.store import FileRecord
from trainyard.checkpoint.background import BackgroundSave, Kind, SaveReport
from trainyard.checkpoint.layout import Held
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
    """When and how steps are saved between the durable ones."""

    interval: int
    saving: LocalSave
    kind: Kind
    claim: Callable[[], None]
    """Called on every rank before the first of them."""
    background: BackgroundSave | None = None
    """Writes them; None: training waits."""
    upload: LazyUpload | None = None
    """Copies them to the run folder; None: they stay where they are."""


class NonPersistentSaves:
    """Saves on all ranks together."""

    def __init__(
        self, between: NonPersistentPlan, ranks: Ranks, report: Callable[[SaveReport, str], object]
    ) -> None:
        """ranks: of training. report: told on the first rank of each save, and in which folder."""
        self._between, self._ranks, self._report = between, ranks, report
        self._claim: Callable[[], None] | None = between.claim

    def is_due(self, step: int) -> bool:
        """Whether a step is saved here, if it is not saved for good."""
        return step % self._between.interval == 0

    @property
    def needs_room(self) -> bool:
        """Whether steps of the run folder come of it."""
        return self._between.upload is not None

    def reserve(self, share: Mapping[Slice, Tensor]) -> None:
        """Make the host memory for what this rank will have to write now."""
        if self._between.background is not None:
            self._between.background.reserve(share)

    def hold_update(self) -> None:
        """The parameters are about to change."""
        if self._between.background is not None:
            self._between.background.hold_update()

    def check(self) -> None:
        """Tell of what could not be written since."""
        background = self._between.background
        if background is not None:
            self._try(background.check)

    def save(self, step: int, tensors: dict[str, Held], contents: StepContents) -> None:
        """Now, or begin to."""
        self._try(lambda: self._save(step, tensors, contents))

    def _save(self, step: int, tensors: dict[str, Held], contents: StepContents) -> None:
        began = time.monotonic()
        background, saving = self._between.background, self._between.saving
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
        self._done(records, SaveReport(step, size, seconds, seconds, self._between.kind))

    def _done(self, records: list[FileRecord], report: SaveReport) -> None:
        if self._ranks.rank == 0:
            self._report(report, self._between.saving.root_url)

    def overtake(self, step: int) -> None:
        """The run folder has this step: copies of older ones are not needed."""
        if self._between.upload is not None:
            self._between.upload.overtake(step)

    def finish(self) -> None:
        """The run ends here, with a step of its own: what is being written becomes whole, what is
        being copied is left."""
        if self._between.background is not None:
            self._try(self._between.background.finish)
        if self._between.upload is not None:
            self._between.upload.close()

    def give_up(self, seconds: float) -> None:
        """Training has failed: let what is being written become whole within so long."""
        if self._between.background is not None:
            self._between.background.give_up(seconds)

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except (TrainyardError, OSError) as error:
            log.warning(
                "a save between those in the run folder failed, training goes on: %s", error
            )


@dataclass(frozen=True, slots=True)
class Saving:
    """For one run on one rank. Every thread that meets those of other ranks does so in a group of
    its own; all ranks build alike."""

    config: PretrainConfig
    groups: ProcessGroups
    lineage: str

    def background(self) -> BackgroundSave | None:
        """What writes the steps of the run folder while training goes on, if it is to."""
        return BackgroundSave(self._ranks()) if self.config.training.async_save else None

    def between(self, there: NonPersistentSteps) -> Callable[[Done], NonPersistentPlan]:
        """How steps are saved outside the run folder."""

        def build(done: Done) -> NonPersistentPlan:
            config = self.config.non_persistent
            assert config.non_persistent_save_interval is not None
            upload = None
            if config.non_persistent_upload:
                upload = LazyUpload(self.config.save, self.lineage, self._ranks(), done)
            saving = LocalSave(there.steps, config.non_persistent_keep_last, upload)
            kind: Kind = "local" if there.is_local else "global"
            background = None
            if self.config.training.async_save:
                background = BackgroundSave(self._ranks(), saving.write, kind)
            return NonPersistentPlan(
                config.non_persistent_save_interval, saving, kind, there.claim, background, upload
            )

        return build

    def _ranks(self) -> Ranks:
        timeout = timedelta(minutes=self.config.parallel.distributed_timeout_minutes)
        group = host_group(self.groups, timeout)
        return Ranks(group, self.groups.rank, self.groups.dims.world_size)
