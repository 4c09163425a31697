"""The two servers that trainyard starts, as their users start them, and what both must refuse."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from flows.server.ephemeral import EphemeralServer
from flows.server.home import PASSWORD
from tests.security.attacks import (
    CREDENTIALS,
    EVIL,
    HOSTS,
    LOG_INS,
    ORIGINS,
    REQUESTS,
    WEBSOCKETS,
    Target,
    basic,
    statuses_for_stranger,
    stranger_reads,
)
from tests.yard.yard import ROOT

SECONDS = 90


@contextmanager
def own_server(home: Path) -> Iterator[Target]:
    """The one that a flow starts for itself."""
    api = EphemeralServer(home)
    try:
        api.wait()
        url = api.url.removesuffix("/api")
        yield Target(url, api.environment[PASSWORD], home, (api._process.pid,))
    finally:
        api.stop()


@contextmanager
def ui_server(yard: Path, log: IO[str] | None = None) -> Iterator[Target]:
    """That of `make ui`; log: where its errors go, if not to ours."""
    command = [sys.executable, "-m", "flows.ui", "--root", str(yard), "--port", "0"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    with subprocess.Popen(
        [*command, "--browse-port", "0"],
        cwd=ROOT,
        env=kept,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            url = next(line.split()[-1] for line in lines if line.startswith("Prefect's pages"))
            text = (yard / ".prefect" / "ui.env").read_text()
            password = re.findall(rf"export {PASSWORD}=(\S+)", text)[0]
            yield Target(url, password, yard / ".prefect", (process.pid,))
        finally:
            process.terminate()


# --- what both must refuse --------------------------------------------------------------------


def answers_its_owner(target: Target) -> None:
    """All that follows would be refused by a server that is down, too."""
    assert target.as_owner("GET", "/api/admin/version").status == 200
    variable = {"name": f"mine{time.time_ns()}", "value": "x"}
    assert target.as_owner("POST", "/api/variables/", variable).status == 201
    for host in (f"localhost:{target.port}", "localhost", f"[::1]:{target.port}"):
        own = {"host": host, "origin": f"http://{host}"}
        assert target.as_owner("GET", "/api/admin/version", **own).status == 200, host


def refuses_who_has_no_password(target: Target) -> None:
    for method, path, body in REQUESTS:
        reply = target.ask(method, path, body)
        assert reply.status in (401, 404, 405), (path, reply)
        assert target.password.encode() not in reply.body
    for given in CREDENTIALS:
        reply = target.ask("POST", "/api/flow_runs/filter", {}, authorization=given)
        assert reply.status == 401, (given, reply)


def refuses_foreign_pages(target: Target) -> None:
    for pattern in ORIGINS:
        origin = pattern.format(port=target.port)
        for method, path, body in REQUESTS:
            reply = target.as_owner(method, path, body, origin=origin)
            assert reply.status == 403, (origin, path, reply)
            assert "access-control-allow-origin" not in reply.headers
        simple = {"origin": origin, "content_type": "text/plain"}
        assert target.as_owner("POST", "/api/variables/", {}, **simple).status == 403
        asked = {
            "origin": origin,
            "access_control_request_method": "POST",
            "access_control_request_headers": "authorization,content-type",
        }
        preflight = target.ask("OPTIONS", "/api/flow_runs/filter", **asked)
        assert preflight.status == 403, (origin, preflight)
        assert not [name for name in preflight.headers if name.startswith("access-control")]


def refuses_foreign_names(target: Target) -> None:
    for pattern in HOSTS:
        host = pattern.format(port=target.port)
        for path in ("/api/admin/version", "/api/health", "/", "/trainyard/log-in"):
            reply = target.as_owner("GET", path, host=host)
            assert reply.status in (400, 421), (host, path, reply)
    assert target.as_owner("GET", "/api/health", host=None).status == 400


def refuses_websockets(target: Target) -> None:
    for path in WEBSOCKETS:
        url = f"ws://{target.authority}{path}"
        for token in (None, "", "trainyard:wrong", "x" * 100):
            assert not lets_in(url, token), (path, token)
        for origin in (f"http://{EVIL}", "null", "http://127.0.0.1:4201"):
            assert not lets_in(url, target.password, origin), (path, origin)
    assert lets_in(f"ws://{target.authority}/api/events/out", target.password)


def closes_websockets_without_a_traceback(target: Target, log: Path) -> None:
    """log: what the server prints."""
    for message in LOG_INS:
        url = f"ws://{target.authority}/api/events/out"
        with connect(url, subprotocols=[Subprotocol("prefect")], open_timeout=10) as socket:
            socket.send(message)
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv(timeout=10)
        received = closed.value.rcvd
        assert received is not None
        assert received.code == 1008, message[:60]
    assert target.as_owner("GET", "/api/admin/version").status == 200
    assert "Traceback" not in log.read_text()


def lets_in(url: str, token: str | None, origin: str | None = None) -> bool:
    """Whether the server accepts messages on a websocket."""
    for protocols in (["prefect"], None):
        try:
            with connect(url, subprotocols=protocols, origin=origin, open_timeout=10) as socket:
                socket.send(json.dumps({"type": "auth", "token": token}))
                if json.loads(socket.recv(timeout=10)) == {"type": "auth_success"}:
                    return True
        except (ConnectionClosed, InvalidHandshake):
            continue
    return False


def tells_no_other_user(target: Target, folder: Path) -> None:
    """folder: of open_folder, in which its home is."""
    assert stranger_reads(folder / "public") == "for all\n"
    files = [path for path in target.home.rglob("*") if path.is_file()]
    assert {"prefect.db", "start.lock"} <= {path.name for path in files}
    for path in (target.home, *files):
        assert stranger_reads(path) == "", path
        assert path.stat().st_mode & 0o077 == 0, path
    for pid in target.pids:
        environ, line = Path(f"/proc/{pid}/environ"), Path(f"/proc/{pid}/cmdline")
        assert target.password in environ.read_text() or "flows.ui" in line.read_text()
        assert stranger_reads(environ) == ""
        assert "flows" in stranger_reads(line)
        assert target.password.partition(":")[2] not in stranger_reads(line)


def lets_no_other_user_in(target: Target) -> None:
    """By the port that every user can find."""
    asked: list[tuple[str, Any]] = [
        (path, body) for method, path, body in REQUESTS if (method, body) == ("POST", {})
    ]
    found = statuses_for_stranger(target, asked)
    assert len(found) > 3
    assert set(found) <= {401, 405}


def keeps_other_passwords_out(one: Target, other: Target) -> None:
    """Of two servers that share a home."""
    assert one.home == other.home
    assert one.password != other.password
    for asked, password in ((one, other.password), (other, one.password)):
        reply = asked.ask("GET", "/api/admin/version", authorization=basic(password))
        assert reply.status == 401


CHECKS = (
    answers_its_owner,
    refuses_who_has_no_password,
    refuses_foreign_pages,
    refuses_foreign_names,
    refuses_websockets,
    lets_no_other_user_in,
)
"""What holds of either server by itself."""
