"""Options of `pretrain`: the model, its data, the optimizer, the run."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.errors import ConfigError
from trainyard.training.pretrain_config import PretrainConfig as LibraryConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainConfig(LibraryConfig):
    """Train a GPT on token files, over any mix of tensor, sequence, pipeline, context and data
    parallelism.

    Run again with the same options and data it continues from its last checkpoint in --save."""

    def __post_init__(self) -> None:
        """Refuse what only a program that calls the library can mean."""
        LibraryConfig.__post_init__(self)  # super() and slots do not meet
        if self.data.dataloader_type == "external":
            raise ConfigError(
                "--dataloader-type external: only a program that brings a loader along can use it, "
                "and this command has none; give single or cyclic (docs/library.md has a loop of "
                "your own)"
            )

    @property
    def nproc_per_node(self) -> int:
        """Ranks that the command line starts."""
        return self.parallel.nproc_per_node

    @property
    def distributed_timeout_minutes(self) -> float:
        """How long ranks wait for each other."""
        return self.parallel.distributed_timeout_minutes

    def check_ranks(self, world_size: int) -> None:
        """Refuse what so many ranks cannot share."""
        from stages.pretrain.checks import check_ranks  # not for --help

        check_ranks(self, world_size)
