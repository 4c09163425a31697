"""What saves steps of a run, built as its options say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from trainyard.checkpoint.background import BackgroundSave, Kind
from trainyard.checkpoint.node_local.save import LocalSave
from trainyard.checkpoint.node_local.upload import LazyUpload
from trainyard.checkpoint.save import Ranks
from trainyard.parallel.groups import ProcessGroups, host_group
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.run.checkpointing import Done
from trainyard.training.run.node_local import NonPersistentSteps
from trainyard.training.run.node_local_saving import Between


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

    def between(self, there: NonPersistentSteps) -> Callable[[Done], Between]:
        """How steps are saved outside the run folder."""

        def build(done: Done) -> Between:
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
            return Between(
                config.non_persistent_save_interval, saving, kind, there.claim, background, upload
            )

        return build

    def _ranks(self) -> Ranks:
        timeout = timedelta(minutes=self.config.parallel.distributed_timeout_minutes)
        group = host_group(self.groups, timeout)
        return Ranks(group, self.groups.rank, self.groups.dims.world_size)
