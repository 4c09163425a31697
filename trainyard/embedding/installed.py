"""Finds embedders of other packages by their entry points. Standard library only."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from trainyard.errors import ConfigError

GROUP = "trainyard.embedders"


def find_embedder(name: str) -> EntryPoint:
    """The entry point of that name; ConfigError names those that there are."""
    points = entry_points(group=GROUP)
    found = [point for point in points if point.name == name]
    if found:
        return found[0]
    known = ", ".join(sorted({point.name for point in points})) or "none"
    raise ConfigError(
        f"--embedder {name}: no installed package has an entry point of this name in {GROUP}; "
        f"known: {known}"
    )


def version_of(name: str) -> dict[str, str]:
    """Name and version of the package that offers it."""
    package = find_embedder(name).dist
    return {} if package is None else {package.name: package.version}
