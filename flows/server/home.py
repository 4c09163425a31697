"""Prefect's folder in a yard, readable by its owner only, and the password of `make ui` in it.

A shell reads the file (`. yard/.prefect/ui.env`), which has the address and the password of a
server, so that no other server gets the password."""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path

from trainyard.artifacts.urls import is_local
from trainyard.errors import ConfigError

UI = "ui.env"

URL = "PREFECT_API_URL"
PASSWORD = "PREFECT_API_AUTH_STRING"
ASKED = "PREFECT_SERVER_API_AUTH_STRING"
LINE = re.compile(rf"^export {PASSWORD}=(\w+:\w+)$", re.ASCII | re.MULTILINE)
HEAD = "# Leads a shell to the server of `make ui`, which writes this. Holds its password.\n"


def home_under(root: str) -> Path:
    """The folder in a root of all runs; in ./yard if that root is not a folder."""
    return Path(root if is_local(root) else "yard", ".prefect")


def new_password() -> str:
    """USER:PASSWORD with 160 bits, without characters special to a shell."""
    return f"trainyard:{secrets.token_hex(20)}"


def make_home(home: Path) -> None:
    """Create Prefect's folder for its owner only; ConfigError if it or a file is another user's."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        there = os.fstat(descriptor)
        if there.st_uid != os.geteuid():
            raise ConfigError(
                f"{home} belongs to user {there.st_uid}, and this program runs as user "
                f"{os.geteuid()}: Prefect keeps its state and its secrets there. Name a yard of "
                f"your own (--root, or the variable YARD), or remove the folder"
            )
        if stat.S_IMODE(there.st_mode) & 0o077:
            os.fchmod(descriptor, 0o700)
        _check_entries(home, descriptor)
    finally:
        os.close(descriptor)


def _check_entries(home: Path, descriptor: int) -> None:
    """Refuse files of another user: a database that they have open too, settings that run a
    program, a link to another place."""
    with os.scandir(descriptor) as entries:
        for entry in entries:
            try:
                owner = entry.stat(follow_symlinks=False).st_uid
            except FileNotFoundError:  # such as a journal that another server just removed
                continue
            if owner != os.geteuid():
                raise ConfigError(
                    f"{home / entry.name} belongs to user {owner}, and this program runs as user "
                    f"{os.geteuid()}, so its owner could read and change Prefect's data; remove it "
                    "and rerun"
                )


def private(path: str, flags: int) -> int:
    """An opener for files that only their owner may read; follows no link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def kept_password(home: Path) -> str:
    """The password of the last `make ui`, or a new one; ConfigError if other users may know it."""
    path = home / UI
    try:
        with open(path, encoding="utf-8", opener=private) as file:
            there, text = os.fstat(file.fileno()), file.read()
    except FileNotFoundError:
        return new_password()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; remove it to get a new one") from error
    if there.st_uid != os.geteuid() or stat.S_IMODE(there.st_mode) & 0o077:
        raise ConfigError(
            f"{path} is readable by others (user {there.st_uid}, mode "
            f"{stat.S_IMODE(there.st_mode):o}), who may know the password in it. Remove it to get "
            f"a new one"
        )
    found = LINE.search(text)
    return found[1] if found else new_password()


def replace(path: Path, text: str) -> None:
    """Write a file atomically, readable by its owner only."""
    scratch = path.with_name(path.name + ".tmp")
    scratch.unlink(missing_ok=True)
    with open(scratch, "x", encoding="utf-8", opener=private) as file:
        file.write(text)
    scratch.replace(path)


def closed(server: str, password: str, home: Path) -> dict[str, str]:
    """Settings of a server with a password that no page of another origin may read.

    server: its URL without a path."""
    return {
        "PREFECT_HOME": str(home),
        ASKED: password,
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": server,
    }


def settings_of_shell(url: str, password: str) -> str:
    """The file by which a shell finds a server."""
    return f"{HEAD}export {URL}={url}\nexport {PASSWORD}={password}\n"
