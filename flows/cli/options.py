"""Options that every command line has: which yard, and where all that is made lies.

`--profile` and `--root` mean the same everywhere. `--yard` is older: what runs a flow takes it for
the root, what looks after a yard (register, doctor, gc) for the profile; each refuses what can only
be meant for the other."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from flows.yard.read_profile import DEFAULT, YARDS
from trainyard.errors import ConfigError

NAME = re.compile(r"[\w.-]+")


def add_yard_of_flow(parser: argparse.ArgumentParser) -> None:
    """Of what runs a flow: `given.profile`, and `given.yard`, the root."""
    parser.add_argument(
        "--profile",
        default=DEFAULT,
        help=f"where stages run: a file of deploy/yards, by its name or path (default: {DEFAULT})",
    )
    parser.add_argument(
        "--root",
        "--yard",
        dest="yard",
        metavar="ROOT",
        help="folder or URL for everything that is made; else variable YARD, else that of the "
        "profile, else yard",
    )


def add_yard_to_look_after(parser: argparse.ArgumentParser, *, has_root: bool = True) -> None:
    """Of what looks after a yard: `given.yard`, the profile, and `given.root`."""
    parser.add_argument(
        "--profile",
        "--yard",
        dest="yard",
        default=DEFAULT,
        metavar="NAME",
        help=f"the yard: a file of deploy/yards, by its name or path (default: {DEFAULT})",
    )
    if has_root:
        parser.add_argument(
            "--root",
            help="folder or URL of everything that is made; else variable YARD, else that of the "
            "profile, else yard",
        )


def check_root(root: str | None) -> None:
    """Refuse the name of a profile where the root is wanted."""
    if root is None:
        return
    is_named = NAME.fullmatch(root) is not None and (YARDS / f"{root}.toml").is_file()
    if is_named or root.endswith(".toml"):
        raise ConfigError(
            f"--root {root} (or --yard) is where all that is made lies, and {root} is a profile, "
            f"which says where stages run: write --profile {root}. A folder of that name is "
            f"--root ./{root}"
        )


def check_profile(profile: str, *, has_root: bool = True) -> None:
    """Refuse a root where a profile is wanted."""
    is_root = "://" in profile or Path(profile).is_dir() or profile.endswith("/")
    if is_root and not profile.endswith(".toml") and not (YARDS / f"{profile}.toml").is_file():
        instead = f"write --root {profile}, beside the --profile that it belongs to"
        raise ConfigError(
            f"--profile {profile} (or --yard) is where stages run, a file of deploy/yards or of "
            f"your own, and {profile} is a folder or URL of what is made: "
            f"{instead if has_root else 'register is about no root, so leave it out'}"
        )
