"""Options of `python -m stages.index`: those of `pretrain` that decide which samples it takes."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.artifacts.output import Output
from trainyard.config import location
from trainyard.errors import ConfigError
from trainyard.training.options.samples import RunSamplesConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig(RunSamplesConfig):
    """Build the sample indices of a training run in advance. Give it the options of `pretrain`, and
    then give `pretrain` the folder as --data-cache-path."""

    output_dir: str = location()
    """Folder or URL for the indices."""

    def __post_init__(self) -> None:
        """Refuse contradictory options."""
        RunSamplesConfig.__post_init__(self)
        if self.data.data_cache_path is not None:
            raise ConfigError(
                "--data-cache-path is where pretrain looks for indices; this stage writes them to "
                "--output-dir, so leave it out here, and give pretrain that folder"
            )

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Each prefix of token files."""
        return self.data.inputs()

    def output(self) -> Output:
        """The folder of the indices."""
        return Output.directory(self.output_dir)
