"""Prefect's folder under a yard, for its owner alone, and the password of `make ui` in it.

The file there is read by a shell (`. yard/.prefect/ui.env`), so that address and password of one
server always come together: another server never gets this one's."""

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
    """The folder of a root of all runs; in `yard` here for one that is no folder."""
    return Path(root if is_local(root) else "yard", ".prefect")


def new_password() -> str:
    """USER:PASSWORD of 160 bits, in letters that mean nothing to a shell."""
    return f"trainyard:{secrets.token_hex(20)}"


def make_home(home: Path) -> None:
    """Make Prefect's folder, or close to others what is there; ConfigError for what is theirs."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        there = os.fstat(descriptor)
        if there.st_uid != os.geteuid():
            raise ConfigError(
                f"{home} belongs to user {there.st_uid}, and this program runs as user "
                f"{os.geteuid()}: Prefect keeps what it believes and its secrets there. Name a "
                f"yard of your own (--root, or the variable YARD), or remove the folder"
            )
        if stat.S_IMODE(there.st_mode) & 0o077:
            os.fchmod(descriptor, 0o700)
        _check_entries(home, descriptor)
    finally:
        os.close(descriptor)


def _check_entries(home: Path, descriptor: int) -> None:
    """Nothing lies in the folder that another user has put there while it was open: a database that
    they have open too, settings that run a program, a link that leads elsewhere."""
    with os.scandir(descriptor) as entries:
        for entry in entries:
            try:
                owner = entry.stat(follow_symlinks=False).st_uid
            except FileNotFoundError:  # of another server, such as a journal, gone meanwhile
                continue
            if owner != os.geteuid():
                raise ConfigError(
                    f"{home / entry.name} belongs to user {owner}, and this program runs as user "
                    f"{os.geteuid()}: who put it there may read and change what Prefect keeps. "
                    f"Remove it"
                )


def private(path: str, flags: int) -> int:
    """An opener of files that nobody else reads, which follows no link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def kept_password(home: Path) -> str:
    """That of the last `make ui`; a new one where there is none. ConfigError for one that others
    may know."""
    path = home / UI
    try:
        with open(path, encoding="utf-8", opener=private) as file:
            there, text = os.fstat(file.fileno()), file.read()
    except FileNotFoundError:
        return new_password()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; remove it, and a new one is made") from error
    if there.st_uid != os.geteuid() or stat.S_IMODE(there.st_mode) & 0o077:
        raise ConfigError(
            f"{path} is not its owner's alone (user {there.st_uid}, mode "
            f"{stat.S_IMODE(there.st_mode):o}): others may know the password in it. Remove it, and "
            f"a new one is made"
        )
    found = LINE.search(text)
    return found[1] if found else new_password()


def replace(path: Path, text: str) -> None:
    """Write a file that its owner alone reads, at once."""
    scratch = path.with_name(path.name + ".tmp")
    scratch.unlink(missing_ok=True)
    with open(scratch, "x", encoding="utf-8", opener=private) as file:
        file.write(text)
    scratch.replace(path)


def closed(server: str, password: str, home: Path) -> dict[str, str]:
    """Settings of a server that asks for a password and lets no page of another origin read its
    answers. server: its URL without a path."""
    return {
        "PREFECT_HOME": str(home),
        ASKED: password,
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": server,
    }


def settings_of_shell(url: str, password: str) -> str:
    """What leads a shell to a server; the text of the file."""
    return f"{HEAD}export {URL}={url}\nexport {PASSWORD}={password}\n"
