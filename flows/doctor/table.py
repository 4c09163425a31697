"""Findings as lines of a table: on a terminal in colour, and never wider than it."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence

from flows.doctor.check import Finding, State

COLOURS = {State.OK: "32", State.WARN: "33", State.FAIL: "31;1", State.SKIPPED: "2"}
NAME_WIDTH, STATE_WIDTH = 20, 9
INDENT = " " * (NAME_WIDTH + STATE_WIDTH)


def print_finding(finding: Finding) -> None:
    """One check: what came of it, then what to do."""
    width = max(60, shutil.get_terminal_size().columns)
    told = textwrap.wrap(finding.told, width - len(INDENT), break_on_hyphens=False) or [""]
    state = _coloured(f"{finding.state:<{STATE_WIDTH}}", finding.state)
    print(f"{finding.name:<{NAME_WIDTH}}{state}{told[0]}")
    for line in told[1:]:
        print(INDENT + line)
    if finding.todo:
        todo = f"-> {finding.todo}"
        for line in textwrap.wrap(todo, width - len(INDENT), break_on_hyphens=False):
            print(INDENT + line)
    if finding.see:
        print(f"{INDENT}see {finding.see}", flush=True)


def print_sum(findings: Sequence[Finding]) -> None:
    """How many came out how."""
    counts = Counter(finding.state for finding in findings)
    print("\n" + ", ".join(f"{counts[state]} {state}" for state in State if counts[state]))


def _coloured(text: str, state: State) -> str:
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\033[{COLOURS[state]}m{text}\033[0m"
