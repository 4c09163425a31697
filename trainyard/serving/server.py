"""The web server: binds, serves until a signal or the end of the engine, and drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Sequence

import uvicorn

from trainyard.errors import ConfigError
from trainyard.hosts import address
from trainyard.serving.app import build_app
from trainyard.serving.event_stream import Connection
from trainyard.serving.outputs import ServedModel
from trainyard.serving.status import Readiness

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
CLOSE_SECONDS = 2
"""After the drain: how long answers that are complete may take to reach slow clients."""
BACKLOG = 1024
IDLE_SECONDS = 75
"""Limit of a connection without requests."""
UNREAD_SECONDS = 600.0
"""Limit of a connection that is full all the time: of a client that reads nothing of an answer, or
so slowly that its buffers stay full."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; ConfigError if that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Of its connections too. The kernel drops one that is full for so long, also while the
        # client lives: else only closing it would, and that waits for the client to read.
        unread_ms = round(1000 * UNREAD_SECONDS)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"--host {host} --port {port} cannot be listened on: {error}; take another --port, or "
            "end the program that listens there"
        ) from error
    return listening


class Server(uvicorn.Server):
    """One server on one engine."""

    def __init__(self, served: ServedModel, *, names: frozenset[str], key: str | None) -> None:
        """names: hosts that it answers to. key: that clients must send; None: none."""
        self._service, self._drain_seconds = served.service, served.limits.drain_seconds
        self.readiness = Readiness(served.service)
        config = uvicorn.Config(
            build_app(served, self.readiness, names=names, key=key),
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            http=Connection,
            ws="none",
            backlog=BACKLOG,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `run_on`."""
        yield

    async def run_on(
        self,
        listening: socket.socket,
        host: str,
        started: Callable[[str], None],
        signals: Sequence[signal.Signals] = SIGNALS,
    ) -> None:
        """Serve until a signal, and then until running requests have ended or the drain's time is
        over; a second signal ends at once. Raises what ended the engine.

        started: is called with the address."""
        loop = asyncio.get_running_loop()
        self._service.on_failure = lambda: setattr(self, "should_exit", True)
        await self._service.start()
        for number in signals:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            started(address(host, listening.getsockname()[1]))
            await self.serve(sockets=[listening])
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)  # already ending
            await self._service.stop()
        if self._service.failure is not None:
            raise self._service.failure

    def _on_signal(self, number: int) -> None:
        if self.readiness.is_draining:
            self.should_exit = True
            return
        self.readiness.is_draining = True
        log.info(
            "%s: running requests have %g s to end; a second signal ends at once",
            *(signal.Signals(number).name, self._drain_seconds),
        )
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_seconds):
                while not self._service.is_idle:
                    await asyncio.sleep(LOOK_SECONDS)
        self._service.give_up()
        self.should_exit = True


def serve(
    served: ServedModel,
    listening: socket.socket,
    *,
    host: str,
    names: frozenset[str],
    key: str | None,
    started: Callable[[str], None],
) -> None:
    """Serve on a socket until a signal. Raises what ended the engine."""
    server = Server(served, names=names, key=key)
    asyncio.run(server.run_on(listening, host, started))
