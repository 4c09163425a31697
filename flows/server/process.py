"""The process of a Prefect server, a flow's own or that of `make ui`; several may share one home.

One after another they bring the database there up to date: two at once would both make the same
tables, and one of them fail."""

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
"""In Prefect's folder; held, by the kernel's word, while a server brings its database up."""
TURN_SECONDS = 120.0
"""How long a server waits for those before it."""
LOOK_SECONDS = 0.1


def serve(
    home: Path,
    listening: int,
    names: Iterable[str] = (),
    any_address: bool = False,
    has_pages: bool = False,
    started: Callable[[], None] = lambda: None,
) -> None:
    """Until a signal ends it. home: Prefect's folder; listening: a descriptor; names and
    any_address: as of Guarded; has_pages: for browsers too."""
    from prefect.server.api.server import create_app  # seconds, in which nobody need wait

    def whole() -> App:
        app: App = create_app()
        return Guarded(LogIn(app) if has_pages else app, names, any_address)

    with ExitStack() as starting:
        starting.enter_context(turn_to_start(home / LOCK))
        level = "warning" if has_pages else "error"
        config = uvicorn.Config(whole, factory=True, log_level=level, lifespan="on")
        server = _Server(config, starting.close, started)
        server.run(sockets=[socket.socket(fileno=listening)])
        if not server.started:
            raise SystemExit(InfrastructureError.exit_status)  # it has said why


class _Server(uvicorn.Server):
    """One that tells when its database is up, or never will be, and when it serves."""

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
def turn_to_start(lock: Path, seconds: float = TURN_SECONDS) -> Iterator[None]:
    """Hold the lock, which says who has it; ends the program in words where it does not come.

    The kernel lets go of it when its holder dies, however it dies."""
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
