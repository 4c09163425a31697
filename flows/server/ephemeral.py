"""Prefect's API for one flow run on this machine, when no server is running.

A server that Prefect starts outlives a killed flow and accepts any client. This one ends with the
program that started it, because it reads from a pipe of that program, as stages do. It requires a
password that only that program has; both get it from the environment.

    python -m flows.server.ephemeral SOCKET PARENT_PIPE   (two inherited descriptors)"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from flows.server.home import PASSWORD, URL, closed, make_home, new_password, private
from trainyard.errors import InfrastructureError

START_SECONDS = 240.0
"""Up to half of it may pass waiting for servers that start in the same home
(flows/server/process.py)."""
STOP_SECONDS = 10.0

FULL_BYTES = 65_536
"""With less than this free on its disk, SQLite cannot start a database."""

LEASES = {
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
        "prefect.server.concurrency.lease_storage.filesystem"
    ),
}
"""The database counts the slots of a limit, so the leases of those slots must outlive the server
too. They are under PREFECT_HOME, where all servers of one database find them."""

LEASE_SECONDS = 60
"""Duration of the lease of a slot: how long the slot of a killed flow stays in use."""

SETTINGS = {
    **LEASES,
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_UI_ENABLED": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS": "5",  # frees expired leases
    "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
}
"""Settings of a server for one run; its database keeps everything for later."""


alone = threading.Event()
"""Set while the server of this program is its own."""


def is_alone() -> bool:
    """Whether this flow has its own server, which starts nothing and ends with the flow."""
    return alone.is_set()


class EphemeralServer:
    """A server on localhost with its database under PREFECT_HOME; port 0 is any free one."""

    def __init__(self, home: Path, port: int = 0, password: str = "") -> None:
        """Start it; raises InfrastructureError if home cannot be written.

        password: USER:PASSWORD that it asks for; a new one if empty."""
        self._home = home
        password = password or new_password()
        try:
            make_home(home)
            self._log = open(home / "server.log", "ab", opener=private)  # noqa: SIM115
        except OSError as error:
            raise InfrastructureError(
                f"Prefect's database cannot be kept in {home}: {error}. Its folder is in the yard "
                f"(--root, or the variable YARD)"
            ) from error
        self._log_began = self._log.tell()
        with socket.socket() as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(("127.0.0.1", port))
            listening.listen(64)
            address = f"http://127.0.0.1:{listening.getsockname()[1]}"
            self.url = f"{address}/api"
            self.environment = {URL: self.url, PASSWORD: password}
            """The variables by which a program finds it."""
            read_end, self._parent_pipe = os.pipe()
            descriptors = (listening.fileno(), read_end)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flows.server.ephemeral", *map(str, descriptors)],
                env={**os.environ, **SETTINGS, **closed(address, password, home)},
                umask=0o077,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C is for the flow, which reports how it ended
            )
            os.close(read_end)

    def wait(self) -> None:
        """Wait until the server answers; InfrastructureError if it does not."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise InfrastructureError(
            f"Prefect's server did not start: {self._why()} (full log: {self._log.name}). To use a "
            f"server that is already running, set PREFECT_API_URL"
        )

    def _why(self) -> str:
        """The last line of the server's log; if the disk is full, which leaves no log, that."""
        if shutil.disk_usage(self._home).free < FULL_BYTES:
            return f"the disk of {self._home} is full; make room, and run it again"
        with open(self._log.name, "rb") as log:
            log.seek(self._log_began)
            output = log.read().decode(errors="replace").split("\n")
        last = next(
            (line.strip() for line in reversed(output) if line.strip()), "it logged nothing"
        )
        status = self._process.poll()
        if status is None:
            return f"no answer within {START_SECONDS:.0f} s; {last}"
        return f"exit status {status}; {last}"

    def stop(self) -> None:
        """Stop the server."""
        os.close(self._parent_pipe)
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


# --- the server process -----------------------------------------------------------------------


def _end_with(parent_pipe: int) -> None:
    os.read(parent_pipe, 1)  # returns when the last write end is closed
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _serve(listening: int, parent_pipe: int) -> None:
    threading.Thread(target=_end_with, args=(parent_pipe,), daemon=True).start()
    from flows.server.process import serve

    serve(Path(os.environ["PREFECT_HOME"]), listening)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
