"""Temporary files of killed runs of this machine.

Object stores have none: an incomplete upload is not an object (a lifecycle rule of the bucket
removes its parts)."""

from __future__ import annotations

import os
from contextlib import suppress

from trainyard.artifacts import store
from trainyard.artifacts.backends.local import TEMPORARY
from trainyard.artifacts.urls import join, local_path


class Abandoned:
    """Those that a command finds. A folder of many artifacts is listed once for all of them."""

    def __init__(self) -> None:
        self._listed: dict[str, list[str]] = {}

    def delete(self, folder_url: str, prefix: str = "") -> None:
        """Remove those below a folder; with `prefix`, only those directly in it whose names start
        with the prefix."""
        folder = local_path(folder_url)
        if folder is None:
            return
        if not prefix:
            for path in list(folder.rglob(f"{TEMPORARY}*")):
                if store.is_abandoned(path.name):
                    store.delete(str(path))
            return
        if folder_url not in self._listed:
            self._listed[folder_url] = _in_folder(str(folder))
        for name in self._listed[folder_url]:
            if name.removeprefix(TEMPORARY).partition("-")[2].startswith(prefix):
                store.delete(join(folder_url, name))


def _in_folder(path: str) -> list[str]:
    with suppress(FileNotFoundError), os.scandir(path) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(TEMPORARY)]
        return [name for name in names if store.is_abandoned(name)]
    return []
