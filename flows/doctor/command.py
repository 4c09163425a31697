"""The command line: every check of a yard, as a table or as JSON.

    python -m flows.doctor [--profile NAME] [--root URL] [--submit] [--json]

Exit status 0: nothing failed; 2: a setting is wrong; 3: something failed that may pass."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence

from flows.cli.options import add_yard_to_look_after, check_profile, check_root
from flows.cli.run_flow import fail
from flows.doctor import machine, places, ranks, schedules, server, slots, store
from flows.doctor.check import Check, Finding, examine_yard, worst
from flows.doctor.table import print_finding, print_sum
from flows.doctor.yard import Yard
from flows.yard.read_profile import read_profile
from trainyard.errors import TrainyardError

CHECKS: tuple[Check[Yard], ...] = (
    *store.CHECKS,
    *server.CHECKS,
    *slots.CHECKS,
    *schedules.CHECKS,
    *places.CHECKS,
    *ranks.CHECKS,
    *machine.CHECKS,
)
"""In their order: ranks tell of the machine that is judged after them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Look at a yard; returns the exit status."""
    given = _parser().parse_args(argv)
    try:
        check_profile(given.yard)
        check_root(given.root)
        profile = read_profile(given.yard)
    except TrainyardError as error:
        return fail(error)
    yard = Yard(profile, profile.yard_root(given.root), given.submit)
    chosen = [check for check in CHECKS if not given.only or check.name in given.only]
    if not given.json:
        print(f"yard {profile.name}: {yard.place.block} jobs, everything under {yard.root}\n")
    findings = list(_shown(examine_yard(chosen, yard), given.json))
    if given.json:
        document = {"format_version": 1, "yard": profile.name, "root": yard.root}
        found = [finding.to_document() for finding in findings]
        print(json.dumps({**document, "checks": found, "exit_status": worst(findings)}, indent=1))
    else:
        print_sum(findings)
    return _leave(worst(findings))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flows.doctor",
        description="Look at everything that a yard needs, and say what to do.",
    )
    add_yard_to_look_after(parser)
    parser.add_argument("--submit", action="store_true", help="start a job of a scheduler as well")
    parser.add_argument("--json", action="store_true", help="a JSON document, no table")
    names = [check.name for check in CHECKS]
    parser.add_argument("--only", action="append", choices=names, help="this check; repeatable")
    return parser


def _shown(findings: Iterator[Finding], is_quiet: bool) -> Iterator[Finding]:
    for finding in findings:
        if not is_quiet:
            print_finding(finding)
        yield finding


def _leave(status: int) -> int:
    """End at once where a check hangs for ever: nothing would end its thread."""
    hanging = [t for t in threading.enumerate() if t.daemon and t.name in {c.name for c in CHECKS}]
    if hanging:
        sys.stdout.flush()
        os._exit(status)
    return status
