"""Output of a job: lines from a stream of bytes, and the log level of each."""

from __future__ import annotations

import codecs
import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from trainyard import json_text
from trainyard.artifacts.replace_file import replace_file
from trainyard.logging import printable

LOG_LINE = re.compile(r"^\d\d:\d\d:\d\d (debug|info|warning|error|critical) +(.*)$", re.DOTALL)
"""Format of trainyard/logging.py, whose time and level the run's logger replaces."""

LABEL = re.compile(r"^ *\d+: ")
"""Prefix that `srun --label` gives the lines of a node."""

LINE_END = re.compile(r"\r\n|\n|\r")
BREAK = re.compile(rb"[\r\n]+")
CHUNK_BYTES = 2**20
MOST_BYTES = 2**16
"""Of a line; a log of one endless line would otherwise be copied to the server again and again."""


def parse_line(line: str) -> tuple[int, str]:
    """The level and text of a stage's log line, any other line is INFO; what would steer a terminal
    is escaped."""
    line = printable(line, kept="\t")
    label = LABEL.match(line)
    found = LOG_LINE.match(line[label.end() :] if label else line)
    if found is None:
        return logging.INFO, line
    return logging.getLevelNamesMapping()[found[1].upper()], (label[0] if label else "") + found[2]


class Lines:
    """Splits a stream into lines, also at the carriage returns of progress bars.

    Of a line beyond MOST_BYTES the beginning is kept, so memory and time per byte are bounded."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._size = 0

    def feed(self, chunk: bytes) -> Iterator[str]:
        """The lines that this chunk completes."""
        *ends, rest = BREAK.split(chunk)
        for part in ends:
            self._append(part)
            yield from self.finish()
        self._append(rest)

    def _append(self, part: bytes) -> None:
        self._kept += part[: MOST_BYTES - len(self._kept)]
        self._size += len(part)

    @property
    def pending_bytes(self) -> int:
        """Size of the unfinished line."""
        return self._size

    def finish(self) -> Iterator[str]:
        """The unfinished line, if any."""
        kept, left_out = bytes(self._kept), self._size - len(self._kept)
        self._kept.clear()
        self._size = 0
        if left_out:  # perhaps in the middle of a character
            yield codecs.getincrementaldecoder("utf-8")("replace").decode(kept) + cut(left_out)
        elif kept:
            yield kept.decode(errors="replace")


def cut(left_out: int) -> str:
    """The mark at the end of a line that was cut."""
    return f" [{left_out} bytes left out]"


def cut_line(line: str) -> str:
    """A line as `Lines` would give it."""
    lines = Lines()
    return "".join([*lines.feed(line.encode(errors="replace")), *lines.finish()])


class Followed:
    """Reads growing files from where this program, or an earlier one, stopped."""

    def __init__(self, folder: Path, memory: str = "followed.json") -> None:
        self._folder = folder
        self._memory = folder / memory
        self._at: dict[str, int] = {}
        self._lines: dict[str, Lines] = {}
        with contextlib.suppress(FileNotFoundError, ValueError):
            read = json_text.loads(self._memory.read_text())
            places = read.items() if isinstance(read, dict) else ()
            self._at = {name: at for name, at in places if type(at) is int and at >= 0}
        self._lines = {name: Lines() for name in self._at}

    def read(self, name: str) -> Iterator[str]:
        """New complete lines of a file; none if it does not exist yet."""
        try:
            file = (self._folder / name).open("rb")
        except FileNotFoundError:
            return
        lines, at = self._lines.setdefault(name, Lines()), self._at.get(name, 0)
        with file:
            if os.fstat(file.fileno()).st_size < at:
                at = 0  # it was truncated or replaced
            file.seek(at)
            while chunk := file.read(CHUNK_BYTES):
                at += len(chunk)
                yield from lines.feed(chunk)
        self._at[name] = at

    def finish(self, name: str) -> Iterator[str]:
        """The last line of a file, if it has no line end."""
        if name in self._lines:
            yield from self._lines[name].finish()

    def remember(self) -> None:
        """Record how far each file was read, for the next program."""
        read = {name: at - self._lines[name].pending_bytes for name, at in self._at.items()}
        replace_file(self._memory, json.dumps(read).encode())
