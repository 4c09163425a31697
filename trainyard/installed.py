"""Finds and calls functions of other packages, by their entry points. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from trainyard.errors import (
    ConfigError,
    DataError,
    InfrastructureError,
    TrainyardError,
    lack_of_memory,
)

T = TypeVar("T")


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
    """The function that the entry point names; ConfigError if it cannot be imported, or is none."""
    point = find_entry_point(option, group, name)
    try:
        found = point.load()
    except (Exception, SystemExit) as error:  # its module may end the process
        raise ConfigError(
            f"{option} {name}: {point.value} could not be imported: {error!r}"
        ) from error
    if not callable(found):
        raise ConfigError(
            f"{option} {name}: {point.value} is {found!r:.80}, and must be a function; change the "
            "package's entry point"
        )
    return found


def call_installed(option: str, name: str, call: Callable[[], T]) -> T:
    """What a function of another package returns. DataError if it raises, or ends the process;
    InfrastructureError for an OSError, such as of the network. Lack of memory is not its fault."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        if isinstance(error, TrainyardError) or lack_of_memory(error) is not None:
            raise
        kind = InfrastructureError if isinstance(error, OSError) else DataError
        raise kind(f"{option} {name}: raised {error!r:.200}; correct that package") from error


def version_of(option: str, group: str, name: str) -> dict[str, str]:
    """Name and version of the package that offers it."""
    package = find_entry_point(option, group, name).dist
    return {} if package is None else {package.name: package.version}
