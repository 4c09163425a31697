"""Runs a stage and writes down every read of files below a folder: `FOLDER LOG KILL_AT STAGE ...`.

A line of LOG is the path, the first byte and the number of bytes of a read from the file system.
The process kills itself once it has read KILL_AT bytes; 0: never."""

from __future__ import annotations

import io
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO

from trainyard.artifacts.backends.local import LocalBackend
from trainyard.artifacts.urls import local_path


def main(folder: str, log: str, kill_at: str, stage: str, *arguments: str) -> None:
    """Run the stage with its command line."""
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    total = 0

    def note(path: Path, start: int, size: int) -> None:
        nonlocal total
        if size and path.is_relative_to(folder):
            os.write(out, f"{path} {start} {size}\n".encode())
            total += size
            if 0 < int(kill_at) <= total:
                os.kill(os.getpid(), signal.SIGKILL)

    class Counted(io.FileIO):
        def readinto(self, buffer: Any, /) -> int | None:
            start, size = self.tell(), super().readinto(buffer)
            note(Path(str(self.name)), start, size or 0)
            return size

        def readall(self) -> bytes:
            start, data = self.tell(), super().readall()
            note(Path(str(self.name)), start, len(data))
            return data

    read_range = LocalBackend.read_range

    def counted_range(self: LocalBackend, url: str, start: int, end: int, *more: Any) -> bytes:
        data = read_range(self, url, start, end, *more)
        note(path_of(url), start, len(data))
        return data

    def counted_open(self: LocalBackend, url: str) -> BinaryIO:
        return io.BufferedReader(Counted(path_of(url)))  # type: ignore[return-value]

    LocalBackend.open_input = counted_open  # type: ignore[method-assign]
    LocalBackend.read_range = counted_range  # type: ignore[method-assign]
    sys.argv = [stage, *arguments]
    runpy.run_module(stage, run_name="__main__", alter_sys=True)


def path_of(url: str) -> Path:
    """The path of a local URL."""
    path = local_path(url)
    assert path is not None
    return path


if __name__ == "__main__":
    main(*sys.argv[1:])
