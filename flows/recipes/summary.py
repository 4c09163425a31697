"""The result of a successful stage, which a flow keeps and its pages show."""

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
    """Why it ran; empty if it did not."""
    seconds: float
    output_digest: str = ""
    manifest_url: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    log: str = ""

    def to_document(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)
