"""Options of `python -m stages.reshard`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.artifacts.output import Output
from trainyard.config import location
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardConfig:
    """Write a checkpoint again, bit for bit: in another number of files, or for transformers."""

    load_dir: str = location()
    """Run folder (its latest step) or step folder to read."""
    save_dir: str = location()
    """Folder to write; a place of its own."""
    saver: Literal["trainyard", "hf"] = "trainyard"
    """Format to write: ours, or a Hugging Face folder for `transformers`."""
    num_shards: int = 1
    """Files that weights (and as many that optimizer states) are spread over."""

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise ConfigError(f"--num-shards must be at least 1, got {self.num_shards}")
        load, save = self.load_dir.rstrip("/") + "/", self.save_dir.rstrip("/") + "/"
        if load.startswith(save) or save.startswith(load):
            raise ConfigError(
                f"--save-dir {self.save_dir} and --load-dir {self.load_dir} lie in one another; "
                "choose a folder of its own for what is written"
            )

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The checkpoint."""
        return {"checkpoint": (self.load_dir,)}

    def output(self) -> Output | None:
        """A folder."""
        return Output.directory(self.save_dir)
