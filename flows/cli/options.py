"""Options that several command lines share: which yard, and where a server listens.

`--profile` and `--root` mean the same everywhere. `--yard` is older: it is the root for commands
that run a flow, and the profile for commands that administer a yard (register, doctor, gc). Each
option refuses a value that only makes sense for the other."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from flows.yard.profile import Profile
from flows.yard.read_profile import DEFAULT, YARDS, read_profile
from trainyard.artifacts.urls import show_url
from trainyard.errors import ConfigError

NAME = re.compile(r"[\w.-]+")

ROOT_DEFAULT = "default: variable YARD, else `store` of the profile, else yard"


# --- a yard -------------------------------------------------------------------------------------


def add_yard_of_flow(parser: argparse.ArgumentParser) -> None:
    """Add the options for running a flow: `given.profile`, and `given.yard`, the root."""
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
        help=f"folder or URL for all output; {ROOT_DEFAULT}",
    )


def add_yard(parser: argparse.ArgumentParser, *, has_root: bool = True) -> None:
    """Add the options for administering a yard: `given.yard`, the profile, and `given.root`."""
    parser.add_argument(
        "--profile",
        "--yard",
        dest="yard",
        default=DEFAULT,
        metavar="NAME",
        help=f"the yard: a file of deploy/yards, by its name or path (default: {DEFAULT})",
    )
    if has_root:
        parser.add_argument("--root", help=f"folder or URL of all output; {ROOT_DEFAULT}")


def read_profile_of_flow(given: argparse.Namespace) -> Profile:
    """The profile that `add_yard_of_flow` parsed; ConfigError for swapped values."""
    check_root(given.yard)
    check_profile(given.profile)
    return read_profile(given.profile)


def read_yard(given: argparse.Namespace) -> tuple[Profile, str]:
    """The profile and the root that `add_yard` parsed; ConfigError for swapped values."""
    check_profile(given.yard)
    check_root(given.root)
    profile = read_profile(given.yard)
    return profile, profile.yard_root(given.root)


def check_root(root: str | None) -> None:
    """Refuse the name of a profile as a root."""
    if root is None:
        return
    is_named = NAME.fullmatch(root) is not None and (YARDS / f"{root}.toml").is_file()
    if is_named or root.endswith(".toml"):
        root = show_url(root)
        raise ConfigError(
            f"--root {root} (or --yard) names the folder or URL of all output, and {root} is a "
            f"profile, which says where stages run: write --profile {root}. A folder of that name "
            f"is --root ./{root}"
        )


def check_profile(profile: str, *, has_root: bool = True) -> None:
    """Refuse a root as a profile."""
    shown = show_url(profile)
    is_root = "://" in profile or Path(profile).is_dir() or profile.endswith("/")
    if is_root and not profile.endswith(".toml") and not (YARDS / f"{profile}.toml").is_file():
        instead = f"write --root {shown}, beside the --profile that it belongs to"
        raise ConfigError(
            f"--profile {shown} (or --yard) names where stages run, a file of deploy/yards or of "
            f"your own, and {shown} is a folder or URL of output: "
            f"{instead if has_root else 'register takes no root, so leave it out'}"
        )


# --- where a server listens ---------------------------------------------------------------------


def add_listening(parser: argparse.ArgumentParser, port: int) -> None:
    """Add the options of a server: `given.host`, `given.port`, `given.allow_host`."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=port, help=f"default {port}; 0: a free one")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="answer to this name too, such as that of a proxy; repeatable",
    )


def cannot_listen(host: str, port: int, error: Exception, variable: str = "") -> ConfigError:
    """The error for an address that is in use or does not exist."""
    return ConfigError(
        f"--host {host} --port {port} cannot be listened on: {error}; take another --port"
        f"{variable}, or end the program that listens there"
    )
