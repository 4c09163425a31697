"""What Prefect's servers wrote. A service in the background that fails says so there alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

BROKEN = "broken-on-purpose"
"""A file of this name lies beside the log of a server that a test has broken."""

BUSY = (
    "sqlite3.OperationalError: database is locked",
    "sqlalchemy.exc.OperationalError: (sqlite3.OperationalError) database is locked",
)
"""SQLite has one writer, and Prefect begins to write in the middle of a transaction: of two at once
one is refused, however long it would wait. Clients and services ask again."""


def break_on_purpose(home: Path) -> None:
    """The server of this folder is to fail from now on."""
    (home / BROKEN).touch()


def tracebacks(text: str) -> list[str]:
    """Each but those of a busy database, with the line above it, which says what failed, and its
    last, which says how."""
    lines = ["", *text.splitlines()]
    found = []
    for number, line in enumerate(lines):
        if "Traceback (most recent call last)" in line:
            below = lines[number + 1 :]
            last = next((one for one in below if one.strip() and not one[0].isspace()), "")
            if last not in BUSY:
                found.append(f"{lines[number - 1].strip()} | {last}"[:300])
    return found


def of_servers(folder: Path) -> Iterator[str]:
    """Those in the logs of all servers whose folders lie below one, each with its log."""
    for log in sorted(folder.rglob("server.log")):
        if not log.is_symlink() and not (log.parent / BROKEN).exists():
            yield from (f"{log}: {error}" for error in tracebacks(log.read_text(errors="replace")))
