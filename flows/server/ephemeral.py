"""Prefect's API for one flow run on this machine, when no server is running.

Prefect would start one itself, but that one lives on when its flow is killed, and lets in whoever
finds its port. This one holds the read end of a pipe, as stages do, ends with whoever started it,
and asks for a password that it alone knows with that program; both have it from the environment.

    python -m flows.server.ephemeral SOCKET LIFELINE      (two inherited descriptors)"""

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
"""Of which it may wait half for others that start on the same home (flows/server/process.py)."""
STOP_SECONDS = 10.0

FULL_BYTES = 65_536
"""With less than this free on its disk, SQLite cannot start a database."""

LEASES = {
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
        "prefect.server.concurrency.lease_storage.filesystem"
    ),
}
"""The slots of a limit are counted in the database; the leases by which they are given back must
outlive the server as well. Under PREFECT_HOME, where all servers of one database find them."""

LEASE_SECONDS = 60
"""Of a lease of a task run, by Prefect: when one was killed its slot is free again after that."""

SETTINGS = {
    **LEASES,
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_UI_ENABLED": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS": "5",  # of leases that have run out
    "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
}
"""What one run needs of a server; its database keeps everything for a later look."""


alone = threading.Event()
"""Set while the server of this program is its own."""


def is_alone() -> bool:
    """True when the flow's server is our own, which starts nothing and ends with the flow."""
    return alone.is_set()


class EphemeralServer:
    """A server on a port of localhost, a free one unless it is named, with its database under
    PREFECT_HOME."""

    def __init__(self, home: Path, port: int = 0, password: str = "") -> None:
        """Start it; raises InfrastructureError when nothing can be written there. password:
        USER:PASSWORD that it asks for; a new one when empty."""
        self._home = home
        password = password or new_password()
        try:
            make_home(home)
            self._log = open(home / "server.log", "ab", opener=private)  # noqa: SIM115
        except OSError as error:
            raise InfrastructureError(
                f"Prefect's database cannot be kept in {home}: {error}. It lies under the yard "
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
            """What leads a program to it."""
            read_end, self._lifeline = os.pipe()
            descriptors = (listening.fileno(), read_end)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flows.server.ephemeral", *map(str, descriptors)],
                env={**os.environ, **SETTINGS, **closed(address, password, home)},
                umask=0o077,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C is for the flow, which has to say how it ended
            )
            os.close(read_end)

    def wait(self) -> None:
        """Until it answers; raises InfrastructureError when it does not."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise InfrastructureError(
            f"Prefect's server did not start: {self._why()} (all of it: {self._log.name}). A "
            f"server that is running already is used when PREFECT_API_URL names it"
        )

    def _why(self) -> str:
        """The last line of its log, or that the disk is full, which leaves no log."""
        if shutil.disk_usage(self._home).free < FULL_BYTES:
            return f"the disk of {self._home} is full; make room, and run it again"
        with open(self._log.name, "rb") as log:
            log.seek(self._log_began)
            said = log.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")
        status = self._process.poll()
        if status is None:
            return f"no answer within {START_SECONDS:.0f} s; {last}"
        return f"exit status {status}; {last}"

    def stop(self) -> None:
        """End it."""
        os.close(self._lifeline)
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


# --- the server process -----------------------------------------------------------------------


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)  # returns when the last write end is closed
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _serve(listening: int, lifeline: int) -> None:
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    from flows.server.process import serve

    serve(Path(os.environ["PREFECT_HOME"]), listening)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
