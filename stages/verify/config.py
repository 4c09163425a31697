"""Options of `python -m stages.verify`."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.artifacts.output import Output
from trainyard.config import location


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyConfig:
    """Re-read artifacts and compare every file with its manifest: python -m stages.verify URL [URL
    ...]."""

    url: tuple[str, ...] = location()
    """Artifacts: a folder or prefix with a manifest, or a folder below which every manifest is
    checked."""

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """None: the stage always reads its artifacts again."""
        return {}

    def output(self) -> Output | None:
        """Nothing is written."""
        return None
