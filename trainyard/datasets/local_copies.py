"""Copies of remote index files on this machine: a bounded folder, what was used longest ago goes
first.

    FOLDER/blocks/DIGEST/whole.npy    a file by the digest of its contents

A copy that is removed while a process maps it stays whole for that process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trainyard.corpus.blocks import TOUCH_SECONDS, BlockFolder
from trainyard.errors import ConfigError

COPY = "whole.npy"
"""Name of the one file of each digest."""

MAX_BYTES = 16 << 30
VARIABLE = "TRAINYARD_INDEX_CACHE_BYTES"


def max_copied_bytes() -> int:
    """Bytes of all copies together: TRAINYARD_INDEX_CACHE_BYTES, else 16 GiB."""
    given = os.environ.get(VARIABLE, "")
    if given and not given.isdecimal():
        raise ConfigError(f"{VARIABLE}={given!r}: give a number of bytes")
    return int(given) if given else MAX_BYTES


class Copies(BlockFolder):
    """A folder of blocks in which the folder of a file says when it was used: the file's own time
    is part of what its digest is remembered by."""

    def use(self, digest: str) -> None:
        """Note that a copy is used."""
        folder = self.root / digest
        with suppress(OSError):  # of another user, or gone: it keeps its place in the queue
            if time.time() - folder.stat().st_mtime > TOUCH_SECONDS:
                os.utime(folder)

    def _files(self) -> Iterator[tuple[float, int, str]]:
        for _, size, path in super()._files():
            with suppress(FileNotFoundError):
                yield Path(path).parent.stat().st_mtime, size, path
