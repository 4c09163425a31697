"""The result of a successful stage, for the flow and its pages."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The result of a successful stage."""

    job: str
    stage: str
    reused: bool
    reason: str
    """Why the stage ran; empty if it did not run."""
    seconds: float
    output_digest: str = ""
    manifest_url: str = ""
    num_runs: int = 1
    """Runs in the stage's job, each with an output."""
    metrics: dict[str, Any] = field(default_factory=dict)
    log: str = ""

    def to_document(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)
