"""A local folder for one run, removed at its end. After a kill, a later run of the same user on the
same machine removes it."""

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
"""Locked while the folder is in use; the kernel releases the lock when the process ends. It holds
the boot id of the machine, since some shared file systems have locks per machine only."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Scratch:
    """Creates the folder, and first removes those of killed runs."""

    def __init__(self, name: str) -> None:
        remove_abandoned(Path(tempfile.gettempdir()))
        # A hanging thread may still write into it, which must not fail the cleanup.
        self._folder = tempfile.TemporaryDirectory(
            prefix=f"{PREFIX}{name}-", ignore_cleanup_errors=True
        )
        self.path = Path(self._folder.name)
        self._lock = _lock(self.path)

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()
        self._lock.close()


def remove_abandoned(root: Path) -> None:
    """Remove the scratch folders in `root` whose runs are dead."""
    for folder in root.glob(PREFIX + "*"):
        remove_if_abandoned(folder)


def abandoned(root: Path) -> list[Path]:
    """The scratch folders in `root` whose runs are dead."""
    return [folder for folder in sorted(root.glob(PREFIX + "*")) if _is_abandoned(folder)]


def remove_if_abandoned(folder: Path) -> None:
    """Remove a scratch folder, unless its run is alive."""
    _is_abandoned(folder, and_remove=True)


def _lock(folder: Path) -> IO[bytes]:
    # Renamed after it is locked: under its own name it is never seen unlocked.
    unlocked = folder / (LOCK + ".new")
    file = unlocked.open("wb")
    file.write(_boot())
    file.flush()
    with contextlib.suppress(OSError):  # a file system without locks: then no run removes it
        fcntl.flock(file, fcntl.LOCK_EX)
        unlocked.rename(folder / LOCK)
    return file


def _is_abandoned(folder: Path, and_remove: bool = False) -> bool:
    """Whether its run is dead; removes it under the same lock, so that no run can take it."""
    with contextlib.suppress(OSError):  # another run removes it, or another user owns it
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
