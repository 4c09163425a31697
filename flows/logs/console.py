"""The console of a flow: a line when a stage starts, a line when it ends.

Everything is logged once, to the run's logger, which Prefect sends to its server. The console shows
the headlines. A stage's own lines replace each other on one line of a terminal; without a terminal,
the console shows one of them every QUIET_SECONDS."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import time
from typing import Any, TextIO, TypeAlias

from trainyard.logging import one_line, printable

Log: TypeAlias = "logging.Logger | logging.LoggerAdapter[Any]"

HEADLINE = "headline"
"""Attribute of a log record that is a headline: the state it reports."""
JOB = "job"
"""Attribute of a log record that is a line of a stage's output: its job."""

WIDTH = 22
QUIET_SECONDS = 15.0
"""Without a terminal, between two lines of stages."""

IN_FRONT = re.compile(r"^(\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\]|\w+:) ")

PAINT = {"done": "\033[32m", "reused": "\033[36m", "failed": "\033[31m", "stopped": "\033[33m"}
DIM, RESET, CLEAR = "\033[2m", "\033[0m", "\r\033[2K"


def headline(
    log: Log,
    job: str,
    state: str,
    seconds: float | None = None,
    digest: str = "",
    note: str = "",
    level: int = logging.INFO,
) -> None:
    """Log that a stage started or ended, which the console always shows."""
    took = "" if seconds is None else f"{seconds:.1f} s"
    text = f"{job:<{WIDTH}} {state:<7} {took:>8}  {digest:<12}  {note}".rstrip()
    log.log(level, "%s", one_line(text), extra={HEADLINE: state})


class Console(logging.Handler):
    """Shows headlines, the newest line of the stages, and warnings of libraries except Prefect."""

    def __init__(self, stream: TextIO, verbose: bool = False) -> None:
        super().__init__()
        self.stream = stream
        self.verbose = verbose
        self._terminal = stream.isatty()
        self._colour = self._terminal and not os.environ.get("NO_COLOR")
        self._last = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record, or skip it."""
        try:
            self._show(record)
        except Exception:
            self.handleError(record)

    def _show(self, record: logging.LogRecord) -> None:
        message = printable(record.getMessage())
        state, job = getattr(record, HEADLINE, ""), getattr(record, JOB, "")
        if state:
            self._print(f"{_clock(record)}  {self._painted(message, state)}")
        elif job and self.verbose:
            self._print(f"          {job}: {message}")
        elif job:
            self._pass_by(f"{job}: {_brief(message)}")
        elif record.levelno >= logging.WARNING and not record.name.startswith("prefect"):
            self._print(f"{_clock(record)}  {record.levelname.lower()}: {message}")

    def _painted(self, text: str, state: str) -> str:
        return f"{PAINT.get(state, '')}{text}{RESET}" if self._colour else text

    def _print(self, text: str) -> None:
        self._last = time.monotonic()
        self.stream.write((CLEAR if self._terminal else "") + text + "\n")
        self.stream.flush()

    def _pass_by(self, text: str) -> None:
        if self._terminal:
            columns = shutil.get_terminal_size().columns - 1
            self.stream.write(f"{CLEAR}{DIM}{('  ' + text)[:columns]}{RESET}")
            self.stream.flush()
        elif time.monotonic() - self._last >= QUIET_SECONDS:
            self._print(f"          {text}")


def _brief(line: str) -> str:
    """A line of a stage without its time or module, and with single spaces."""
    return IN_FRONT.sub("", " ".join(line.split()))


def _clock(record: logging.LogRecord) -> str:
    return time.strftime("%H:%M:%S", time.localtime(record.created))


def take_over(verbose: bool = False) -> None:
    """Replace Prefect's console, which shows every state of every run, with ours."""
    from prefect.logging.handlers import PrefectConsoleHandler

    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, PrefectConsoleHandler):
            root.removeHandler(handler)
    root.addHandler(Console(sys.stderr, verbose))
