"""Options of `python -m stages.retro_explore`."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.artifacts.output import Output
from trainyard.config import also


@dataclass(frozen=True, slots=True, kw_only=True)
class RetroExploreConfig:
    """Look into a Retro project: python -m stages.retro_explore PROJECT, then calls such as
    get_db_chunk_text 5, a line each, from a prompt or a pipe. print_usage lists them."""

    project: str = also("retro_project_dir", role="location")
    """Folder or URL of the project."""

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """None: retro_explore writes no artifact."""
        return {}

    def output(self) -> Output | None:
        """None."""
        return None
