"""Versions of the libraries that decide what a clean corpus holds."""

from __future__ import annotations

from importlib import metadata

from trainyard.errors import ConfigError


def versions_of(*packages: str, extra: str = "clean") -> dict[str, str]:
    """The installed versions, without importing them; ConfigError for a missing package.

    extra: of trainyard, that installs them."""
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError as error:
            raise ConfigError(
                f"the package {name} is not installed; "
                f"run `pip install '.[{extra}]'` in the checkout"
            ) from error
    return found
