"""What stands on this machine where a file should be: a link that leads nowhere, a folder, a pipe.

Looks at names alone, and opens nothing."""

from __future__ import annotations

import errno
import glob
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from trainyard.artifacts.urls import has_glob, local_path

NO_FILE = "not a file but a pipe or a device; copy it into a file"

TOO_LONG = "the file system takes no name as long; choose a shorter one"


def why_absent(url: str, otherwise: str = "there is no such file or object") -> str:
    """Why there is no file: what stands in its place or leads there, or `otherwise`."""
    path = local_path(url)
    return (_in_place_of(path) if path is not None else None) or otherwise


def _in_place_of(path: Path) -> str | None:
    for at in (*reversed(path.parents), path):
        if os.path.islink(at) and (fault := _fault_of_link(at)):
            return f"{at} is {fault}" if at != path else fault
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return TOO_LONG if error.errno == errno.ENAMETOOLONG else None
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else NO_FILE


def _fault_of_link(path: Path) -> str | None:
    try:
        path.stat()
    except FileNotFoundError:
        return f"a link to {os.readlink(path)}, which does not exist; mend or remove it"
    except OSError as error:
        if error.errno == errno.ELOOP:
            return f"a link to {os.readlink(path)}, which leads back to it; mend or remove it"
    return None


def broken_link(url: str) -> tuple[Path, str] | None:
    """Of what a pattern or a folder stands for, a link that leads to no file, and its fault."""
    root = local_path(url)
    if root is None:
        return None
    if has_glob(url) and not root.is_file():
        found: Iterable[Path] = map(Path, glob.glob(str(root), recursive=True))
    else:
        found = (Path(at, name) for at, _, names in os.walk(root) for name in names)
    for path in found:
        shown = path.relative_to(root).parts if root in path.parents else ()
        if os.path.islink(path) and not any(part.startswith(".") for part in shown):
            fault = _fault_of_link(path)
            if fault is not None:
                return path, fault
    return None
