"""Options of `python -m stages.merge`."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.artifacts.output import Output
from trainyard.artifacts.urls import has_glob, parent
from trainyard.config import location
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeConfig:
    """Join every .bin/.idx pair of a folder into one pair, in the order of their names."""

    input: str = location()
    """Folder or URL that holds the pairs."""
    output_prefix: str = location()
    """PREFIX.bin and PREFIX.idx are written; not inside the input folder."""

    def __post_init__(self) -> None:
        if has_glob(self.input):
            raise ConfigError(f"--input {self.input}: name a folder, not a pattern")
        if parent(self.output_prefix) == self.input.rstrip("/"):
            raise ConfigError(
                f"--output-prefix {self.output_prefix} lies in the --input folder, so a second run "
                "would merge its own output; choose a place outside it"
            )

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The folder."""
        return {"input": (self.input,)}

    def output(self) -> Output | None:
        """A prefix."""
        return Output.prefix(self.output_prefix)
