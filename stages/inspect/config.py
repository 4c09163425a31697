"""Options of `python -m stages.inspect`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.artifacts.output import Output
from trainyard.config import execution, location
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectConfig:
    """Show the content of a checkpoint: python -m stages.inspect CHECKPOINT. With --diff OTHER,
    show the differences between two checkpoints; exit status 0: equal, 4: different."""

    checkpoint: str = location()
    """Run folder (its latest step) or step folder."""
    diff: str | None = location(None)
    """Checkpoint to compare with: tensors bit for bit, in any layouts, then training state, options
    and other files."""
    filter: tuple[str, ...] = ()
    """Show only tensors whose name matches one of these patterns (* ? [..]), such as
    model.decoder.*; --diff then compares tensors alone."""
    verify_checkpoint: Literal["none", "sizes", "digests"] = execution("sizes")
    """What to check against the manifest first. none: only documents; sizes: the sizes of all
    files; digests: their contents, which reads every byte."""
    max_rows: int = execution(200)
    """Tensors or differences to print at most; 0 prints all. --json has them all."""
    json: bool = execution(False)
    """Print one JSON document instead of tables."""

    def __post_init__(self) -> None:
        """Refuse a negative number of rows."""
        if self.max_rows < 0:
            raise ConfigError(f"--max-rows must be at least 0, got {self.max_rows}")

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """None: inspect writes no artifact."""
        return {}

    def output(self) -> Output | None:
        """None."""
        return None
