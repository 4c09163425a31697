"""What a job says: lines out of a stream of bytes, and the level that a stage gave each."""

from __future__ import annotations

import codecs
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

LOG_LINE = re.compile(r"^\d\d:\d\d:\d\d (debug|info|warning|error|critical) +(.*)$", re.DOTALL)
"""What trainyard/logging.py writes; the run's logger has a clock and a level of its own."""

LABEL = re.compile(r"^ *\d+: ")
"""What `srun --label` puts before the lines of a node."""

LINE_END = re.compile(r"\r\n|\n|\r")
CHUNK_BYTES = 2**20


def parse_line(line: str) -> tuple[int, str]:
    """The level and the text of a stage's own log line; any other line is information."""
    label = LABEL.match(line)
    found = LOG_LINE.match(line[label.end() :] if label else line)
    if found is None:
        return logging.INFO, line
    return logging.getLevelNamesMapping()[found[1].upper()], (label[0] if label else "") + found[2]


class Lines:
    """Lines of any length as they come; the carriage return of a progress bar ends one too."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, chunk: bytes) -> Iterator[str]:
        """The lines that this chunk completes."""
        *lines, self._rest = LINE_END.split(self._rest + self._decoder.decode(chunk))
        yield from filter(None, lines)

    @property
    def pending_bytes(self) -> int:
        """Of a line whose end has not come."""
        return len(self._rest.encode()) + len(self._decoder.getstate()[0])

    def finish(self) -> Iterator[str]:
        """What is left without an end."""
        rest, self._rest = self._rest + self._decoder.decode(b"", final=True), ""
        if rest:
            yield rest


class Followed:
    """Files that others append to, read on from where this program or the one before it was."""

    def __init__(self, folder: Path, memory: str = "followed.json") -> None:
        self._folder = folder
        self._memory = folder / memory
        self._at: dict[str, int] = {}
        self._lines: dict[str, Lines] = {}
        if self._memory.exists():
            self._at = json.loads(self._memory.read_text())
        self._lines = {name: Lines() for name in self._at}

    def read(self, name: str) -> Iterator[str]:
        """The whole lines that a file has got since; none when it is not there yet."""
        try:
            file = (self._folder / name).open("rb")
        except FileNotFoundError:
            return
        lines, at = self._lines.setdefault(name, Lines()), self._at.get(name, 0)
        with file:
            if os.fstat(file.fileno()).st_size < at:
                at = 0  # it was begun anew
            file.seek(at)
            while chunk := file.read(CHUNK_BYTES):
                at += len(chunk)
                yield from lines.feed(chunk)
        self._at[name] = at

    def finish(self, name: str) -> Iterator[str]:
        """A last line without an end."""
        if name in self._lines:
            yield from self._lines[name].finish()

    def remember(self) -> None:
        """Note how far was read, for a program that follows after this one."""
        following = self._memory.with_suffix(".tmp")
        read = {name: at - self._lines[name].pending_bytes for name, at in self._at.items()}
        following.write_text(json.dumps(read))
        following.replace(self._memory)
