"""Attacks on a Prefect server by foreign pages and other users, as tables."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

NOBODY = 65534
BUSY_SECONDS = 30
EVIL = "evil.example"
ID = "00000000-0000-4000-8000-000000000000"

REQUESTS: list[tuple[str, str, Any]] = [
    ("GET", "/api/admin/version", None),
    ("GET", "/api/admin/settings", None),
    ("POST", "/api/admin/database/drop", {"confirm": True}),
    ("POST", "/api/variables/", {"name": "planted", "value": "x"}),
    ("POST", "/api/flow_runs/filter", {}),
    ("POST", "/api/logs/filter", {}),
    ("POST", "/api/artifacts/filter", {}),
    ("POST", "/api/block_documents/filter", {"include_secrets": True}),
    ("POST", f"/api/flow_runs/{ID}/set_state", {"state": {"type": "CANCELLING"}}),
    ("POST", f"/api/deployments/{ID}/create_flow_run", {"job_variables": {"command": "id"}}),
    ("POST", "/api/work_pools/", {"name": "mine", "type": "process"}),
    ("PATCH", "/api/work_pools/local", {"base_job_template": {}}),
    ("POST", "/api/events", []),
    ("GET", "/api/openapi.json", None),
    ("GET", "/openapi.json", None),
    ("GET", "/docs", None),
    ("GET", "/redoc", None),
    ("POST", "/api/health", {}),
    ("GET", "/api//health/../admin/version", None),
    ("GET", "/api/variables/name/health", None),
    ("GET", "/api/admin/version?/health", None),
]
"""Each does something, or tells something, that is for the owner alone."""

WEBSOCKETS = [
    "/api/events/in",
    "/api/events/out",
    "/api/logs/out",
    "/api/task_runs/subscriptions/scheduled",
    "/api/work_pools/local/workers/connect",
]


LOG_INS: list[str | bytes] = [
    '{"type": "auth"}',
    '{"type": "auth", "token": null}',
    '{"type": "auth", "token": "trainyard:wrong"}',
    '{"type": "auth", "token": "trainyard:\xe9"}',
    '{"type": "auth", "token": "\\ud800"}',
    '{"type": "auth", "token": 7}',
    '{"type": "auth", "token": ["trainyard"]}',
    '{"type": "auth", "token": {}}',
    '{"type": "other", "token": "trainyard:\xe9"}',
    '["auth"]',
    '"auth"',
    "7",
    "",
    "no JSON",
    "[" * 100_000,
    '{"type": "auth", "token": ' + 100_000 * "[" + "}",
    b"\0\xff",
    b'{"type": "auth", "token": "trainyard:wrong"}',
]
"""First messages of a websocket, none with the password."""


def basic(text: str) -> str:
    """The header Authorization of USER:PASSWORD."""
    return f"Basic {base64.b64encode(text.encode()).decode()}"


CREDENTIALS = [
    None,
    "",
    "Basic",
    "Basic !!!",
    basic(""),
    basic(":"),
    basic("trainyard:"),
    basic("trainyard"),
    basic("admin:admin"),
    basic("None"),
    basic("trainyard:" + 40 * "0"),
    basic("trainyard:\xe9"),
    "Bearer trainyard",
    "Digest username=trainyard",
]

ORIGINS = [
    f"http://{EVIL}",
    f"https://{EVIL}",
    f"http://{EVIL}:{{port}}",
    f"http://127.0.0.1:{{port}}.{EVIL}",
    f"http://127.0.0.1.{EVIL}:{{port}}",
    "http://127.0.0.1",
    "http://127.0.0.1:4201",
    "http://localhost:{port}",
    "null",
    "file://",
    "",
]
"""Pages of other origins, those of another port or name of this machine among them."""

HOSTS = [
    EVIL,
    f"{EVIL}:{{port}}",
    f"127.0.0.1.{EVIL}:{{port}}",
    f"localhost.{EVIL}",
    f"127.0.0.1:{{port}}.{EVIL}",
    f"127.0.0.1@{EVIL}",
    "10.0.0.7:{port}",
    "",
]


class Reply(NamedTuple):
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes


class Target(NamedTuple):
    """A running server, and what its owner knows of it."""

    url: str
    """Without a path."""
    password: str
    home: Path
    pids: tuple[int, ...]

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    @property
    def authority(self) -> str:
        return f"127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, **headers: str | None) -> Reply:
        """What it answers; a header that is None is not sent, `_` stands for `-`.

        Asked again while its database is busy, as Prefect's client does."""
        deadline = time.monotonic() + BUSY_SECONDS
        while (reply := self._once(method, path, body, headers)).status == 503:
            if time.monotonic() > deadline:
                break
            time.sleep(1)
        return reply

    def _once(self, method: str, path: str, body: Any, headers: dict[str, str | None]) -> Reply:
        head = {"Host": self.authority, "Content-Type": "application/json"}
        for name, value in headers.items():
            key = name.replace("_", "-").title()
            head.pop(key, None)
            if value is not None:
                head[key] = value
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            data = b"" if body is None else json.dumps(body).encode()
            for key, value in {**head, "Content-Length": str(len(data))}.items():
                connection.putheader(key, value)
            connection.endheaders(data)
            reply = connection.getresponse()
            names = {name.lower() for name, _ in reply.getheaders()}
            found = {name: reply.getheader(name, "") for name in names}
            return Reply(reply.status, found, reply.read())
        finally:
            connection.close()

    def as_owner(self, method: str, path: str, body: Any = None, **headers: str | None) -> Reply:
        """The same with the password."""
        return self.ask(method, path, body, authorization=basic(self.password), **headers)


# --- another user of this machine -----------------------------------------------------------------


def as_stranger(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as another user."""
    if os.geteuid():
        pytest.skip("only root can play another user")
    return subprocess.run(
        command, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, text=True, cwd="/"
    )


def stranger_reads(path: Path) -> str:
    """What another user can read of a file or folder; empty for nothing."""
    return as_stranger("ls" if path.is_dir() else "cat", str(path)).stdout


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="trainyard-open-"))
    try:
        folder.chmod(0o755)
        (folder / "public").write_text("for all\n")
        yield folder
    finally:
        rmtree(folder)


def statuses_for_stranger(target: Target, asked: list[tuple[str, Any]]) -> list[int]:
    """What another user who found the port is answered to POSTs of (path, body).

    A fork: the interpreter may lie where others cannot start it."""
    if os.geteuid():
        pytest.skip("only root can play another user")
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            found = [target.ask("POST", path, body).status for path, body in asked]
            os.write(write_end, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as answers:
        text = answers.read()
    os.waitpid(child, 0)
    return list(json.loads(text))
