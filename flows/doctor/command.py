"""The command line: every check of a yard, as a table or as JSON.

    python -m flows.doctor [--profile NAME] [--root URL] [--submit] [--json]

Exit status 0: nothing failed; 2: a setting is wrong; 3: a failure that may pass by itself."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Sequence

from flows.cli.options import add_yard, read_yard
from flows.cli.run_flow import fail
from flows.doctor import (
    backends,
    flow_schedules,
    machine,
    ranks,
    server,
    slots,
    stage_packages,
    store,
)
from flows.doctor.check import Check, Finding, State, examine_yard, worst
from flows.doctor.context import YardContext
from trainyard.arguments import Parser
from trainyard.errors import TrainyardError
from trainyard.logging import printable

CHECKS: tuple[Check[YardContext], ...] = (
    *store.CHECKS,
    *server.CHECKS,
    *slots.CHECKS,
    *flow_schedules.CHECKS,
    *backends.CHECKS,
    *ranks.CHECKS,
    *machine.CHECKS,
    *stage_packages.CHECKS,
)
"""In this order: the ranks find the machine that the last checks judge."""

COLOURS = {State.OK: "32", State.WARN: "33", State.FAIL: "31;1", State.SKIPPED: "2"}
NAME_WIDTH, STATE_WIDTH = 20, 9
INDENT = " " * (NAME_WIDTH + STATE_WIDTH)


def main(argv: Sequence[str] | None = None) -> int:
    """Check a yard; returns the exit status."""
    given = _parser().parse_args(argv)
    try:
        profile, root = read_yard(given)
    except TrainyardError as error:
        return fail(error)
    yard = YardContext(profile, root, given.submit)
    chosen = chosen_checks(given.only) if given.only else CHECKS
    if not given.json:
        print(f"yard {profile.name}: {yard.site.backend} jobs, all output under {yard.root}\n")
    findings = []
    for finding in examine_yard(chosen, yard):
        findings.append(finding)
        if not given.json:
            print_finding(finding)
    if given.json:
        document = {"format_version": 1, "yard": profile.name, "root": yard.root}
        found = [finding.to_document() for finding in findings]
        print(json.dumps({**document, "checks": found, "exit_status": worst(findings)}, indent=1))
    else:
        print_sum(findings)
    return _exit_status(worst(findings))


def chosen_checks(names: Sequence[str]) -> list[Check[YardContext]]:
    """The checks of these names, and those that they need: without the latter, a check of the
    server would start a server of Prefect's own where none is named."""
    wanted = set(names)
    for check in reversed(CHECKS):  # what a check needs stands before it
        if check.name in wanted:
            wanted |= set(check.needs)
    return [check for check in CHECKS if check.name in wanted]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m flows.doctor",
        description="Check everything that a yard needs, and say what to do.",
    )
    add_yard(parser)
    parser.add_argument("--submit", action="store_true", help="also submit a job to the scheduler")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    names = [check.name for check in CHECKS]
    parser.add_argument("--only", action="append", choices=names, help="run this check; repeatable")
    return parser


def _exit_status(status: int) -> int:
    """Return the status; if a check hangs, exit at once, because nothing can end its thread."""
    hanging = [t for t in threading.enumerate() if t.daemon and t.name in {c.name for c in CHECKS}]
    if hanging:
        sys.stdout.flush()
        os._exit(status)
    return status


# --- the table: in colour and at most as wide as the terminal -----------------------------------


def print_finding(finding: Finding) -> None:
    """Print a finding, then what to do."""
    width = max(60, shutil.get_terminal_size().columns)
    message = printable(finding.message)
    lines = textwrap.wrap(message, width - len(INDENT), break_on_hyphens=False) or [""]
    state = _coloured(f"{finding.state:<{STATE_WIDTH}}", finding.state)
    print(f"{finding.name:<{NAME_WIDTH}}{state}{lines[0]}")
    for line in lines[1:]:
        print(INDENT + line)
    if finding.todo:
        todo = printable(f"-> {finding.todo}")
        for line in textwrap.wrap(todo, width - len(INDENT), break_on_hyphens=False):
            print(INDENT + line)
    if finding.see:
        print(f"{INDENT}see {finding.see}", flush=True)


def print_sum(findings: Sequence[Finding]) -> None:
    """Print the number of checks with each result."""
    counts = Counter(finding.state for finding in findings)
    print("\n" + ", ".join(f"{counts[state]} {state}" for state in State if counts[state]))


def _coloured(text: str, state: State) -> str:
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\033[{COLOURS[state]}m{text}\033[0m"
