"""The command line.

    python -m flows.gc [--yard NAME] [--root URL] [--dry-run] [--json] [--corpus-days 7 ...]

Exit status 0; 3 when something could not be removed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from flows.gc.policy import Policy
from flows.gc.sweep import sweep
from flows.gc.told import lines
from flows.profile import DEFAULT, Profile, read_profile
from flows.program import fail
from trainyard.artifacts.urls import is_local, local_path
from trainyard.errors import InfrastructureError, TrainyardError


def main(argv: Sequence[str] | None = None) -> int:
    """Sweep a yard; returns the exit status."""
    given = _parser().parse_args(argv)
    try:
        policy = Policy(**{field.name: getattr(given, field.name) for field in fields(Policy)})
        profile = read_profile(given.yard)
        root = profile.yard_root(given.root)
        swept = sweep(root, run_places(profile, root), policy, given.dry_run)
    except TrainyardError as error:
        return fail(error)
    if given.json:
        print(json.dumps(swept.to_document(), indent=1))
    else:
        print("\n".join(lines(swept, given.dry_run)))
    if swept.failed:
        print(f"error: {len(swept.failed)} could not be removed", file=sys.stderr)
        return InfrastructureError.exit_status
    return 0


def run_places(profile: Profile, root: str) -> list[Path]:
    """The folders of this machine below which a yard's run folders lie."""
    path = local_path(root) if is_local(root) else Path("yard")
    own = [] if profile.run_folder is None else [Path(profile.run_folder)]
    return [*([path] if path is not None else []), *own]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flows.gc", description="Remove what a yard keeps of no use."
    )
    parser.add_argument("--yard", default=DEFAULT, help="profile: a name in deploy/yards or a file")
    parser.add_argument(
        "--root", help="folder or URL of all runs; else variable YARD, else its own"
    )
    parser.add_argument("--dry-run", action="store_true", help="tell what would go, remove nothing")
    parser.add_argument("--json", action="store_true", help="a JSON document, no lines")
    for field in fields(Policy):
        default: Any = field.default
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(
            flag, type=type(default), default=default, help=f"default {default:g}; docs/gc.md"
        )
    return parser
