"""Logging of all programs: one format, the rank in every line, other libraries from warnings up.

Modules do `log = logging.getLogger(__name__)`; only a `__main__` calls `configure`. Messages may
quote files, so control characters are escaped (`printable`) and long ones cut (`shortened`)."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

OURS = ("trainyard", "stages", "flows")
LEVELS = ("debug", "info", "warning", "error")

COLOURS = {"DEBUG": "\033[2m", "WARNING": "\033[33m", "ERROR": "\033[31m", "CRITICAL": "\033[31;1m"}
RESET = "\033[0m"
MOST_CHARS = 2**16
"""Of a message."""


def printable(text: str, kept: str = "\n\t") -> str:
    """The text with unprintable characters escaped: ESC as \\x1b.

    kept: characters that are not escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else _escape(c) for c in text)


def shortened(text: str, most: int = MOST_CHARS) -> str:
    """The beginning of a text, and how much was left out: names in messages may be foreign."""
    left_out = len(text) - most
    return text if left_out <= 0 else f"{text[:most]} [{left_out} characters left out]"


def one_line(text: str) -> str:
    """The text as one line, so that it cannot imitate another log line."""
    return printable(text, kept="")


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


class Formatter(logging.Formatter):
    """`12:30:05 info  rank 1  loop: message`; the rank only with several ranks."""

    def __init__(self, colour: bool) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self.colour = colour
        several = os.environ.get("WORLD_SIZE", "1") not in ("", "1")
        self.rank = f"rank {os.environ.get('RANK', '0')}  " if several else ""

    def format(self, record: logging.LogRecord) -> str:
        """One line per record, followed by its traceback if it has one."""
        parts = record.name.split(".")
        where = parts[1] if parts[0] == "stages" and len(parts) > 1 else parts[-1]
        time = self.formatTime(record, self.datefmt)
        line = f"{time} {record.levelname.lower():<7} {self.rank}{where}: "
        line += printable(shortened(record.getMessage()))
        if record.exc_info:
            line += "\n" + printable(self.formatException(record.exc_info))
        paint = COLOURS.get(record.levelname) if self.colour else None
        return f"{paint}{line}{RESET}" if paint else line


def wants_colour(stream: TextIO) -> bool:
    """A terminal, unless NO_COLOR is set (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def configure(level: str = "info", stream: TextIO | None = None) -> None:
    """Log our packages from `level` up and others from warnings up, to stderr."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Formatter(wants_colour(stream)))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in OURS:
        logging.getLogger(name).setLevel(level.upper())
    logging.captureWarnings(True)
