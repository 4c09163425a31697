"""Write .env, which docker compose reads: settings of this machine and new secrets.

    python3 deploy/env.py [--file .env]

A second run keeps every value, adds missing ones, and updates version and revision: the first step
of an upgrade. Standard library only."""

from __future__ import annotations

import argparse
import errno
import os
import re
import secrets
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINE = re.compile(r"^([A-Z_][A-Z0-9_]*)=(.*)$")
SOCKET = Path("/var/run/docker.sock")
HEAD = """\
# Read by docker compose; written by `make env`, which keeps what is here when it runs again.
# Holds secrets: keep it from the repository and from other people.
"""


def version() -> str:
    """Returns trainyard's version, the tag of its images."""
    text = (ROOT / "trainyard" / "version.py").read_text()
    found = re.search(r'^VERSION = "([^"]+)"', text, re.MULTILINE)
    assert found, "trainyard/version.py says no version"
    return found[1]


def revision() -> str:
    """Returns the commit of the source, marked `-dirty` if uncommitted; `unknown` without git."""
    command = [
        "git",
        "-C",
        str(ROOT),
        "describe",
        "--always",
        "--abbrev=40",
        "--exclude=*",
        "--dirty",
    ]
    try:
        described = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()


def engine_socket() -> Path:
    """Returns the path of the engine's socket on this machine."""
    host = os.environ.get("DOCKER_HOST", "")
    return Path(host.removeprefix("unix://")) if host.startswith("unix://") else SOCKET


def engine_group() -> str:
    """The group that may talk to the engine."""
    socket = engine_socket()
    return str(socket.stat().st_gid) if socket.exists() else "0"


def owner() -> str:
    """Who owns what stages write: the person who runs this, but never root."""
    return f"{os.getuid()}:{os.getgid()}" if os.getuid() else "10001:10001"


def secret() -> str:
    """160 bits, of letters that need no escape in a URL."""
    return secrets.token_hex(20)


ALWAYS_NEW: dict[str, Callable[[], str]] = {
    "TRAINYARD_VERSION": version,
    "TRAINYARD_REVISION": revision,
}
MADE_ONCE: dict[str, Callable[[], str]] = {
    "COMPOSE_PROFILES": lambda: "store",
    "YARD_HOME": lambda: str(ROOT / "yard-compose"),  # not that of the quick start
    "YARD_USER": owner,
    "YARD_BUCKET": lambda: "yard",
    "YARD_S3_ENDPOINT": lambda: "http://store:8333",
    "YARD_S3_KEY_ID": lambda: "yard-" + secrets.token_hex(6),
    "YARD_S3_SECRET": secret,
    "POSTGRES_PASSWORD": secret,
    "PREFECT_AUTH": lambda: f"admin:{secret()}",
    "DOCKER_SOCKET": lambda: str(engine_socket()),
    "DOCKER_GID": engine_group,
}


def read(path: Path) -> dict[str, str]:
    """What a file says already, in its order; from now on only its owner reads it.

    Refuses links and files of others: who chose the passwords would know them."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return {}
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise SystemExit(f"{path} is a symbolic link; remove it, or copy its file here") from error
    with os.fdopen(descriptor) as stream:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise SystemExit(f"{path} is no file; remove it, and run again")
        if found.st_uid != os.geteuid():
            raise SystemExit(
                f"{path} belongs to user {found.st_uid}; run as it, or remove the file"
            )
        os.fchmod(descriptor, 0o600)
        lines = stream.read().splitlines()
    return {match[1]: match[2] for line in lines if (match := LINE.match(line))}


def settled(before: dict[str, str]) -> dict[str, str]:
    """The values to write."""
    current = {name: make() for name, make in ALWAYS_NEW.items()}
    missing = {name: make() for name, make in MADE_ONCE.items() if name not in before}
    return {**current, **{k: v for k, v in before.items() if k not in current}, **missing}


def write(path: Path, values: dict[str, str]) -> None:
    """Replace the file at once; only its owner reads it."""
    text = HEAD + "".join(f"{name}={value}\n" for name, value in values.items())
    scratch = path.with_name(path.name + ".tmp")
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)
    scratch.replace(path)


def make_home(values: dict[str, str]) -> str:
    """Make the folder that stages and flows see theirs, so that they can write; returns what to
    tell of its owner. One that holds files keeps its owner."""
    home = Path(values["YARD_HOME"])
    if not home.is_absolute():
        raise SystemExit(f"YARD_HOME={home}: write an absolute path; containers see the same one")
    home.mkdir(parents=True, exist_ok=True)
    user, group = (int(part) for part in values["YARD_USER"].split(":"))
    before = home.stat()
    if before.st_uid == user:
        return ""
    if os.getuid() or any(home.iterdir()):
        return (
            f"{home} belongs to user {before.st_uid}, and containers write as YARD_USER={user}:"
            f"{group}: chown it, or correct YARD_HOME or YARD_USER in .env"
        )
    os.chown(home, user, group)
    return f"{home} belongs to {user}:{group} now (YARD_USER), before to {before.st_uid}"


def main() -> int:
    """The command line; returns its exit status."""
    parser = argparse.ArgumentParser(description="Write .env for docker compose.")
    parser.add_argument("--file", type=Path, default=ROOT / ".env")
    given = parser.parse_args()
    before = read(given.file)
    values = settled(before)
    remark = make_home(values)
    if values != before:
        write(given.file, values)
    made = [name for name in values if name not in before]
    print(f"{given.file}: {'made ' + ', '.join(made) if made else 'nothing is missing'}")
    if remark:
        print(remark)
    return 0


if __name__ == "__main__":
    sys.exit(main())
