"""The command line.

    python -m flows.gc [--profile NAME] [--root URL] [--remove] [--json] [--corpus-days 7 ...]

Without --remove it lists what would be removed, and removes nothing.

Exit status 0; 3 if something could not be removed or checked."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from flows.backends.container.options import ContainerOptions
from flows.cli.options import add_yard, read_yard
from flows.cli.run_flow import fail
from flows.gc.machine import run_homes
from flows.gc.policy import Policy
from flows.gc.report import lines
from flows.gc.sweep import sweep
from flows.yard.profile import Profile
from trainyard.arguments import Parser
from trainyard.artifacts.urls import local_path
from trainyard.errors import InfrastructureError, TrainyardError
from trainyard.logging import printable

KEPT_FOR = {
    "keep_corpus_versions": "newest versions of a corpus to keep in any case",
    "corpus_days": "days to keep a superseded version; longer if something in use refers to it",
    "claim_hours": "hours after which a claim that is not renewed is stale",
    "upload_hours": "hours to keep incomplete uploads and temporary files",
    "attempt_days": "days to keep unfinished work, from which a rerun resumes",
    "keep_runs": "newest run folders of each job to keep in any case",
    "run_days": "days to keep all other run folders",
}
"""Help of the options of the policy."""


def main(argv: Sequence[str] | None = None) -> int:
    """Sweep a yard; returns the exit status."""
    given = _parser().parse_args(argv)
    try:
        policy = Policy(**{field.name: getattr(given, field.name) for field in fields(Policy)})
        profile, root = read_yard(given)
        homes = homes_of(profile, root)
        is_named, engines = given.root is not None, engines_of(profile)
        swept = sweep(root, homes, policy, given.remove, is_named, engines)
    except TrainyardError as error:
        return fail(error)
    if given.json:
        print(json.dumps(swept.to_document(), indent=1))
    else:
        print("\n".join(lines(swept, not given.remove)))
    if swept.failed:
        print(f"error: {len(swept.failed)} could not be removed", file=sys.stderr)
        return InfrastructureError.exit_status
    if swept.plan.unseen:
        print(printable(f"error: {swept.plan.unseen[0]}"), file=sys.stderr)
        return InfrastructureError.exit_status
    return 0


def homes_of(profile: Profile, root: str) -> list[Path]:
    """The folders of this machine that hold a yard's run folders."""
    own = None if profile.run_folder is None else Path(profile.run_folder)
    return run_homes(local_path(root) or Path("yard"), own)


def engines_of(profile: Profile) -> tuple[str | None, ...]:
    """The Docker engines of a yard's stages, None for the default one; empty without containers."""
    every = profile.options, *profile.options_by_stage.values()
    return tuple(dict.fromkeys(one.engine for one in every if isinstance(one, ContainerOptions)))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m flows.gc",
        description="List what a yard no longer needs; with --remove, remove it.",
    )
    add_yard(parser)
    does = parser.add_mutually_exclusive_group()
    does.add_argument("--remove", action="store_true", help="remove what is listed")
    does.add_argument("--dry-run", action="store_true", help="only list it (the default)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    for field in fields(Policy):
        default: Any = field.default
        flag = "--" + field.name.replace("_", "-")
        unit, text = field.name.rsplit("_")[-1], f"{KEPT_FOR[field.name]} (default {default:g})"
        number = "N" if field.name.startswith("keep") else unit.upper()
        parser.add_argument(flag, type=type(default), default=default, metavar=number, help=text)
    return parser
