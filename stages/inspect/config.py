"""Options of `python -m stages.inspect`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.artifacts.output import Output
from trainyard.config import execution, location
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectConfig:
    """Show what a checkpoint holds: python -m stages.inspect CHECKPOINT; or with --diff OTHER what
    differs between two, which ends with status 0 where nothing does and with 4 otherwise."""

    checkpoint: str = location()
    """Run folder (its latest step) or step folder."""
    diff: str | None = location(None)
    """Another one, to compare with: tensors by value, bit for bit, in whatever layouts; then
    training state, options and other files."""
    filter: tuple[str, ...] = ()
    """Only tensors whose name matches one of these patterns (* ? [..]), as model.decoder.*; with
    --diff nothing but tensors is compared then."""
    verify_checkpoint: Literal["none", "sizes", "digests"] = execution("sizes")
    """What of the files is compared with the manifest first: documents alone, sizes, or digests
    (all of them are read)."""
    max_rows: int = execution(200)
    """Tensors, and differences, to print at most; 0 prints all. --json has them all."""
    json: bool = execution(False)
    """Print one JSON document in place of tables."""

    def __post_init__(self) -> None:
        """Refuse what is no question."""
        if self.max_rows < 0:
            raise ConfigError(f"--max-rows must be at least 0, got {self.max_rows}")

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """None that count: nothing is made of what is read."""
        return {}

    def output(self) -> Output | None:
        """Nothing is written."""
        return None
