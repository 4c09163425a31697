"""The process of a Prefect server, for one flow or for `make ui`.

Several servers may share one home. They migrate its database one after another: two at once would
both create the same tables, and one would fail."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import uvicorn

from flows.server.guard import App, Guarded
from flows.server.log_in import LogIn
from trainyard.errors import InfrastructureError

LOCK = "start.lock"
"""In Prefect's folder; locked while a server migrates the database."""
LOCK_SECONDS = 120.0
"""How long a server waits for the lock."""
LOOK_SECONDS = 0.1


def serve(
    home: Path,
    listening: int,
    names: Iterable[str] = (),
    any_address: bool = False,
    has_pages: bool = False,
    started: Callable[[], None] = lambda: None,
) -> None:
    """Serve until a signal.

    home: Prefect's folder. listening: a file descriptor. names, any_address: see Guarded.
    has_pages: serve browsers too. started: called once it serves."""
    from prefect.server.api.server import create_app  # takes seconds

    def guarded() -> App:
        app: App = create_app()
        return Guarded(LogIn(app) if has_pages else app, names, any_address)

    with ExitStack() as starting:
        starting.enter_context(start_lock(home / LOCK))
        level = "warning" if has_pages else "error"
        config = uvicorn.Config(guarded, factory=True, log_level=level, lifespan="on")
        server = _Server(config, starting.close, started)
        server.run(sockets=[socket.socket(fileno=listening)])
        if not server.started:
            raise SystemExit(InfrastructureError.exit_status)  # uvicorn has logged why


class _Server(uvicorn.Server):
    """A server that reports when it has started, and when it serves."""

    def __init__(
        self, config: uvicorn.Config, tried: Callable[[], None], serves: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._tried = tried
        self._serves = serves

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._tried()
        if self.started:
            self._serves()


@contextmanager
def start_lock(lock: Path, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold the lock of a starting server; exits with a message if it takes too long.

    The file names the process that has it. The kernel releases it when that process dies."""
    with lock.open("a+") as file:
        deadline = time.monotonic() + seconds
        while not _is_ours(file.fileno()):
            if time.monotonic() >= deadline:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                raise SystemExit(
                    f"process {holder} has been bringing up the server of another flow in "
                    f"{lock.parent} for {seconds:.0f} s; end it if it hangs"
                )
            time.sleep(LOOK_SECONDS)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _is_ours(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
