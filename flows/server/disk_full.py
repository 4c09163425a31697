"""A disk without room under Prefect's database: told as what it is, by a flow's own server.

Prefect itself says 500, which a flow takes for a database that will be back."""

from __future__ import annotations

import errno
import json
import shutil
import sqlite3
import time
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeAlias

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

FULL_SECONDS = 30.0
"""For how long a full disk may pass by itself, as after a save that failed."""
AGAIN_SECONDS = 5
"""After which a client is to ask again meanwhile; it asks six times (flows/cli/run_flow.py)."""
LITTLE_BYTES = 65_536
"""With less than this free, whatever SQLite could not do failed for want of room."""


class DiskFullMiddleware:
    """An application that tells a full disk of another one: for a while as something to be asked
    again (503), then as what it is (507), which a flow ends with."""

    def __init__(self, app: App, home: Path) -> None:
        self._app = app
        self._home = home
        self._since = self._last = float("-inf")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        held: list[Message] = []

        async def pass_on(message: Message) -> None:
            if held or message.get("status") == HTTPStatus.INTERNAL_SERVER_ERROR:
                held.append(message)  # the error itself comes after the answer to it
            else:
                await send(message)

        try:
            await self._app(scope, receive, pass_on)
        except Exception as error:
            if not held or not is_full(error, self._home):
                await _send_all(held, send)
                raise
            await _send_all(self._answer(), send)
        else:
            await _send_all(held, send)

    def _answer(self) -> list[Message]:
        now = time.monotonic()
        if now - self._last > FULL_SECONDS:
            self._since = now
        self._last = now
        is_over = now - self._since >= FULL_SECONDS
        status = HTTPStatus.INSUFFICIENT_STORAGE if is_over else HTTPStatus.SERVICE_UNAVAILABLE
        body = json.dumps({"detail": full(self._home)}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if not is_over:
            headers.append((b"retry-after", b"%d" % AGAIN_SECONDS))
        start = {"type": "http.response.start", "status": int(status), "headers": headers}
        return [start, {"type": "http.response.body", "body": body}]


async def _send_all(messages: list[Message], send: Send) -> None:
    for message in messages:
        await send(message)


def is_full(error: BaseException | None, home: Path) -> bool:
    """True when an error, or what it came from, is that of a disk or quota that is used up."""
    while error is not None:
        origin = getattr(error, "orig", error)  # of an error of SQLAlchemy
        if isinstance(origin, OSError) and origin.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if isinstance(origin, sqlite3.OperationalError):
            code = getattr(origin, "sqlite_errorcode", 0) & 0xFF
            if code == sqlite3.SQLITE_FULL or has_no_room(home):
                return True
        error = error.__cause__ or error.__context__
    return False


def has_no_room(home: Path) -> bool:
    """True when next to nothing is free on the disk of a folder."""
    return shutil.disk_usage(home).free < LITTLE_BYTES


def full(home: Path) -> str:
    """In words, with what to do."""
    return (
        f"the disk of {home} is full, so that Prefect's database there cannot be written: make "
        f"room, and run it again; it goes on from here"
    )
