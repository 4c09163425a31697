"""Finds functions of other packages by their entry points. Standard library only."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from trainyard.errors import ConfigError


def find_entry_point(option: str, group: str, name: str) -> EntryPoint:
    """The entry point of that name in a group; ConfigError names those that there are.

    option: the flag that named it, for messages."""
    points = entry_points(group=group)
    found = [point for point in points if point.name == name]
    if found:
        return found[0]
    known = ", ".join(sorted({point.name for point in points})) or "none"
    raise ConfigError(
        f"{option} {name}: no installed package has an entry point of this name in {group}; "
        f"known: {known}"
    )


def load_entry_point(option: str, group: str, name: str) -> Any:
    """What the entry point names; ConfigError if it cannot be imported."""
    point = find_entry_point(option, group, name)
    try:
        return point.load()
    except Exception as error:
        raise ConfigError(
            f"{option} {name}: {point.value} could not be imported: {error!r}"
        ) from error


def version_of(option: str, group: str, name: str) -> dict[str, str]:
    """Name and version of the package that offers it."""
    package = find_entry_point(option, group, name).dist
    return {} if package is None else {package.name: package.version}
