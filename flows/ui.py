"""Prefect's pages and API for the runs of a yard: the server behind `make ui`.

    python -m flows.ui --root yard [--port 4200] [--browse-port 4201]

It asks for a password, which is in the yard's folder `.prefect`, readable by its owner only. It
refuses foreign host names and pages of other origins, and starts `flows.browse` for the files to
which its pages link. It serves until SIGTERM or SIGINT. This module does not import Prefect at the
top, because Prefect reads its environment on import."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from flows.cli.options import add_listening, cannot_listen
from flows.cli.run_flow import ENVIRONMENT, fail
from flows.server.home import (
    ASKED,
    UI,
    closed,
    home_under,
    kept_password,
    make_home,
    replace,
    settings_of_shell,
)
from flows.server.log_in import leading_page
from flows.server.process import LOCK, serve, start_lock
from trainyard.arguments import Parser
from trainyard.errors import ConfigError, InfrastructureError, TrainyardError
from trainyard.hosts import address, is_of_this_machine
from trainyard.variables import OF_PREFECT

PORT = 4200
LOG_IN = "log-in.html"
ANSWER_SECONDS = 5.0

SETTINGS = {
    **ENVIRONMENT,
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "flows.server.leases",
    "PREFECT_SERVER_UI_API_URL": "/api",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Serve; returns the exit status."""
    given = _parser().parse_args(argv)
    try:
        home = _home(given.home or home_under(given.root))
        os.umask(0o077)
        if how := _already_running(home, address(given.host, given.port)):
            print(how)
            return 0
        listening = _bound(given.host, given.port)
        server = address(given.host, listening.getsockname()[1])
        message = f"Prefect's pages: {server}\n{_how_to_log_in(home)}"
        password = _asked() or _kept(home, server)
    except TrainyardError as error:
        return fail(error)
    os.environ.update({**SETTINGS, **closed(server, password, home)})
    if given.root:
        _show_files(given.root, given.browse_port)
    try:
        serve(
            home,
            listening.detach(),
            names=(given.host, *given.allow_host),
            any_address=not is_of_this_machine(given.host),
            has_pages=True,
            started=lambda: print(message, flush=True),
        )
    except KeyboardInterrupt:
        return 130
    return 0


def _home(home: Path) -> Path:
    try:
        make_home(home)
    except OSError as error:
        raise InfrastructureError(
            f"Prefect's database cannot be kept in {home}: {error}. The folder is in --root (YARD "
            f"of make), or is --home"
        ) from error
    return home.absolute()


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise cannot_listen(host, port, error, " (UI_PORT of make)") from error


def _asked() -> str:
    """The password from the environment; Prefect fails on each request if it is not ASCII."""
    password = os.environ.get(ASKED, "")
    if not password.isascii():
        raise ConfigError(f"{ASKED} must be USER:PASSWORD in ASCII characters; choose another one")
    return password


def _kept(home: Path, server: str) -> str:
    """The password of this folder, written to files for a browser and a shell."""
    with start_lock(home / LOCK):  # of two servers in a new yard, one creates it
        password = kept_password(home)
        replace(home / UI, settings_of_shell(f"{server}/api", password))
        replace(home / LOG_IN, leading_page(server, password))
    return password


def _how_to_log_in(home: Path) -> str:
    """How to log in, for the terminal."""
    if os.environ.get(ASKED):
        return f"  they ask for the password of {ASKED}"
    return (
        f"  they ask for the password in {home / UI}, or once in each browser open\n"
        f"  {(home / LOG_IN).as_uri()}\n"
        f"  for register, workers and prefect in another shell:  . {home / UI}"
    )


def _already_running(home: Path, server: str) -> str:
    """A line if the pages of this folder are served at this address already; else empty."""
    try:
        is_ours = f"={server}/api\n" in (home / UI).read_text()
        if not is_ours:
            return ""
        with urllib.request.urlopen(f"{server}/api/health", timeout=ANSWER_SECONDS):
            pass
    except OSError:
        return ""
    return f"Prefect's pages already run: {server} (log in: {(home / LOG_IN).as_uri()})"


def _show_files(root: str, port: int) -> None:
    """Serve the files of the yard until this process ends."""
    command = [sys.executable, "-m", "flows.browse", "--root", root, "--port", str(port)]
    without = {name: v for name, v in os.environ.items() if not name.startswith(OF_PREFECT)}
    subprocess.Popen([*command, "--end-with", str(os.getpid())], env=without)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m flows.ui",
        description="Serve Prefect's pages and API for the runs of a yard, behind a password.",
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--root", help="folder or s3:// URL of all runs; its files are served too")
    where.add_argument("--home", type=Path, help="Prefect's folder, if not .prefect under --root")
    add_listening(parser, PORT)
    parser.add_argument("--browse-port", type=int, default=4201, help="port of the file server")
    return parser


if __name__ == "__main__":
    sys.exit(main())
