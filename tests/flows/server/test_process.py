"""A flow's own server: it starts alone, or says why it does not, and tells of a full disk."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from pathlib import Path

import pytest

from flows.server import disk_full
from flows.server.disk_full import DiskFullMiddleware, Message, Receive, Send, is_full
from flows.server.ephemeral import EphemeralServer
from flows.server.process import turn_to_start
from trainyard.errors import InfrastructureError


def test_one_server_at_a_time_starts_and_the_next_is_told_of_it_in_bounded_time(
    tmp_path: Path,
) -> None:
    lock = tmp_path / "start.lock"
    with turn_to_start(lock):
        holder = lock.read_text().strip()
        words = f"process {holder} has been bringing up"
        with pytest.raises(SystemExit, match=words), turn_to_start(lock, 0.2):
            pass
    with turn_to_start(lock, 0.2):
        assert lock.read_text().strip() == holder


def test_a_home_that_cannot_be_made_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "yard").write_text("a file")
    with pytest.raises(InfrastructureError, match="Prefect's database cannot be kept in"):
        EphemeralServer(tmp_path / "yard" / ".prefect")


@pytest.mark.slow
def test_a_server_that_does_not_start_is_told_with_the_last_line_of_its_log(
    tmp_path: Path,
) -> None:
    (tmp_path / "start.lock").mkdir()
    (tmp_path / "server.log").write_text("of yesterday\n")
    api = EphemeralServer(tmp_path)
    try:
        with pytest.raises(InfrastructureError, match="did not start: exit status 1; IsADirectory"):
            api.wait()
    finally:
        api.stop()


# --- a full disk ----------------------------------------------------------------------------------


def answers(app: DiskFullMiddleware) -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, headers and body of one request."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    asyncio.run(app({"type": "http"}, receive, send))
    start, body = sent
    return start["status"], dict(start["headers"]), body["body"]


def failing(error: Exception) -> disk_full.App:
    """What Prefect does: it answers 500, and the error comes after."""

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})
        raise error

    return app


def test_a_full_disk_is_asked_again_for_a_while_and_then_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = DiskFullMiddleware(failing(OSError(errno.ENOSPC, "No space left on device")), tmp_path)
    status, headers, _ = answers(app)
    assert (status, headers[b"retry-after"]) == (503, b"5")
    monkeypatch.setattr(disk_full, "FULL_SECONDS", 0.0)
    status, headers, body = answers(app)
    assert status == 507
    assert b"retry-after" not in headers
    assert f"the disk of {tmp_path} is full" in body.decode()


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        answers(DiskFullMiddleware(failing(KeyError("x")), tmp_path))


def test_sqlite_on_a_full_database_is_a_full_disk_and_a_missing_table_is_not(
    tmp_path: Path,
) -> None:
    with sqlite3.connect(tmp_path / "some.db") as database:
        database.execute("CREATE TABLE t (x BLOB)")
        database.execute("PRAGMA max_page_count = 4")
        with pytest.raises(sqlite3.OperationalError) as full:
            database.execute("INSERT INTO t VALUES (zeroblob(1000000))")
        with pytest.raises(sqlite3.OperationalError) as missing:
            database.execute("INSERT INTO u VALUES (1)")
    assert is_full(full.value, tmp_path)
    assert not is_full(missing.value, tmp_path)
