"""Answers calls until the input ends."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

from stages.retro_explore.calls import call, shown
from stages.retro_explore.config import RetroExploreConfig
from stages.runtime.context import StageRun
from trainyard.errors import TrainyardError
from trainyard.logging import printable
from trainyard.retrieval.retro import Retro

PROMPT = "retro> "
ENDS = ("quit", "exit", "quit()", "exit()")
HELPS = ("help", "help()", "?")


def run(config: RetroExploreConfig, stage: StageRun) -> dict[str, Any]:
    """Answer the calls. At a prompt a wrong one is explained; in a pipe it ends the program."""
    project = Retro.open(config.project)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    at_prompt = sys.stdin.isatty()
    if at_prompt:
        project.print_usage()
    for line in _lines(at_prompt):
        try:
            _answer(project, line)
        except TrainyardError as error:
            if not at_prompt:
                raise
            print(printable(str(error)))
    return {}


def _answer(project: Retro, line: str) -> None:
    if line in HELPS:
        project.print_usage()
        return
    result = call(project, line)
    if result is not None:
        print(shown(result), flush=True)


def _lines(at_prompt: bool) -> Iterator[str]:
    while True:
        if at_prompt:
            print(PROMPT, end="", flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() in ENDS:
            return
        if line.strip():
            yield line.strip()
