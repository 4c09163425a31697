"""What a flow keeps of a stage that ended well, and its pages show."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a flow keeps of a stage that ended well."""

    job: str
    stage: str
    reused: bool
    reason: str
    """Why it ran; empty when it did not."""
    seconds: float
    output_digest: str = ""
    manifest_url: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    log: str = ""

    def to_document(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)
