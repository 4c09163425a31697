"""A local folder for one run alone, removed at its end; or, when the run was killed, by a later one
of the same user on the same machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import IO

PREFIX = "trainyard-"

LOCK = ".lock"
"""Locked for as long as the folder is in use: the kernel lets go of it with the process, however
that ends. It holds the number of the machine's boot, since some shared file systems know of the
locks of one machine only."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Scratch:
    """The folder; made by this, after those that killed runs left are removed."""

    def __init__(self, name: str) -> None:
        remove_abandoned(Path(tempfile.gettempdir()))
        # A thread that hangs may still write into it: that is no reason to fail at the end.
        self._folder = tempfile.TemporaryDirectory(
            prefix=f"{PREFIX}{name}-", ignore_cleanup_errors=True
        )
        self.path = Path(self._folder.name)
        self._lock = _hold(self.path)

    def close(self) -> None:
        """Remove it."""
        self._folder.cleanup()
        self._lock.close()


def remove_abandoned(root: Path) -> None:
    """Remove the scratch folders in `root` whose runs are gone."""
    for folder in root.glob(PREFIX + "*"):
        remove_if_abandoned(folder)


def abandoned(root: Path) -> list[Path]:
    """The scratch folders in `root` whose runs are gone."""
    return [folder for folder in sorted(root.glob(PREFIX + "*")) if _is_abandoned(folder)]


def remove_if_abandoned(folder: Path) -> None:
    """Remove a scratch folder, unless its run lives."""
    _is_abandoned(folder, and_remove=True)


def _hold(folder: Path) -> IO[bytes]:
    # Renamed when it is locked: under its own name nobody ever sees it free.
    unlocked = folder / (LOCK + ".new")
    file = unlocked.open("wb")
    file.write(_boot())
    file.flush()
    with contextlib.suppress(OSError):  # a file system without locks: then nobody sweeps it
        fcntl.flock(file, fcntl.LOCK_EX)
        unlocked.rename(folder / LOCK)
    return file


def _is_abandoned(folder: Path, and_remove: bool = False) -> bool:
    """Removed under the same lock that tells, if at all: nobody can take it in between."""
    with contextlib.suppress(OSError):  # another run removes it, or it is not ours to touch
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        with (folder / LOCK).open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_of_this_boot = file.read() == _boot()
            if is_of_this_boot and and_remove:
                shutil.rmtree(folder, ignore_errors=True)
            return is_of_this_boot
    return False


def _boot() -> bytes:
    return BOOT_ID.read_bytes() if BOOT_ID.exists() else b""
