"""Embedders of other packages, by their entry points. Standard library only."""

from __future__ import annotations

from typing import Any

from trainyard import installed

OPTION, GROUP = "--embedder", "trainyard.embedders"


def load_embedder(name: str) -> Any:
    """The function of that name; ConfigError for an unknown one, or a package that fails."""
    return installed.load_entry_point(OPTION, GROUP, name)


def version_of(name: str) -> dict[str, str]:
    """Name and version of the package that offers it."""
    return installed.version_of(OPTION, GROUP, name)
