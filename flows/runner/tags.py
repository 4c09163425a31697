"""Tags by which a server knows and counts what a yard runs."""

from __future__ import annotations


def limit_tag(yard: str, stage: str) -> str:
    """The tag by which a server counts the jobs of a stage in a yard."""
    return f"yard:{yard}:{stage}"
