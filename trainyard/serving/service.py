"""Requests of an event loop on an engine at the other end of a connection.

What a step made comes in one message. If the engine fails or its process is gone, every open
request gets an error, and `on_failure` is called: an engine that failed is not used again. No
torch."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from trainyard.errors import InfrastructureError, TrainyardError
from trainyard.inference.engine import EngineStats
from trainyard.inference.request import Request
from trainyard.serving.wire import (
    Frames,
    Piece,
    Report,
    decoded_error,
    decoded_piece,
    decoded_stats,
    encoded_request,
    framed,
)

STOP_SECONDS = 10.0


class QueueFullError(TrainyardError):
    """As many requests wait as may."""


class EngineFailedError(InfrastructureError):
    """The engine has ended with an error."""


class Stream:
    """The pieces of requests that belong together, for one reader on the loop. A reader that is
    slower than the engine gets what came meanwhile in one piece, so that it catches up. An error
    ends all of the requests."""

    def __init__(
        self, num_requests: int, cancel: Callable[[], None], *, wakes_at_ends: bool = False
    ) -> None:
        """cancel: frees what the requests hold in the engine. wakes_at_ends: the reader waits for
        the end of a request, not for each piece."""
        self._cancel, self._wakes_at_ends = cancel, wakes_at_ends
        self._arrived: dict[int, Piece] = {}
        """What is not read, by the place of its request; the oldest first."""
        self._error: Exception | None = None
        self._waiting: asyncio.Future[None] | None = None
        """Of the reader."""
        self._num_unread = num_requests
        self.num_open = num_requests
        """Requests whose last piece has not arrived."""
        self.began_at: dict[int, float] = {}
        """When the first piece of a request arrived, by the loop's clock."""

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> tuple[int, Piece]:
        """The next piece, with the place of its request among them; ends with the last request.
        Raises what the engine says against a request, EngineFailedError, or another error that
        `fail` was given."""
        if not self._num_unread:
            raise StopAsyncIteration
        while not self._arrived and self._error is None:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if self._error is not None:
            raise self._error
        index = next(iter(self._arrived))
        piece = self._arrived.pop(index)
        self._num_unread -= piece.finish_reason is not None
        return index, piece

    def put(self, index: int, piece: Piece) -> None:
        """Called on the loop with the next piece of a request."""
        if self._error is not None:
            return  # it was on its way when the requests were cancelled
        is_last = piece.finish_reason is not None
        self.num_open -= is_last
        if index not in self.began_at:
            self.began_at[index] = asyncio.get_running_loop().time()
        before = self._arrived.get(index)
        self._arrived[index] = piece if before is None else before.then(piece)
        if is_last or not self._wakes_at_ends:
            self._wake()

    def fail(self, error: Exception) -> None:
        """Called on the loop: cancel the requests at once, whether or not the reader reads, which
        gets this error instead of what it has not read. Without effect if all pieces have arrived,
        or behind another error."""
        if self.num_open:
            self.num_open = 0
            self._error = error
            self._arrived.clear()
            self._cancel()
            self._wake()

    def _wake(self) -> None:
        waiting = self._waiting
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


class EngineService:
    """Requests of an event loop on an engine, whose `EngineSide` has the other end."""

    def __init__(
        self, connection: socket.socket, *, max_tokens: int, max_queued: int, stats: EngineStats
    ) -> None:
        """max_tokens: of a prompt with its output. max_queued: requests that may wait for their
        turn. stats: the engine's before it began."""
        self._connection, self._max_queued = connection, max_queued
        self.max_tokens = max_tokens
        self.stats = stats
        """Of the last step."""
        self._transport: asyncio.Transport | None = None
        self._commands: list[list[Any]] = []
        """That go in one message, once the loop has run what is ready."""
        self._numbers = itertools.count()
        self._rows: dict[int, tuple[Stream, int]] = {}
        """Requests that have not ended: the stream of each, and its place there."""
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._open: set[Stream] = set()
        self._ended: asyncio.Future[None] | None = None
        self._is_stopping = False
        self.failure: Exception | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.why_gone: Callable[[], str] = lambda: "it has closed its connection"
        """What became of an engine that ended without a word."""

    async def start(self) -> None:
        """Begin to talk to the engine."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        self._transport, _ = await loop.create_connection(
            lambda: _Receiver(self), sock=self._connection
        )

    async def stop(self) -> None:
        """End the engine, and wait for that, but not for a long call; requests that are open get no
        more."""
        assert self._ended is not None
        assert self._transport is not None
        self._is_stopping = True
        self._send(["end"])
        await asyncio.wait([self._ended], timeout=STOP_SECONDS)
        self._transport.close()

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs."""
        return self.failure is None and not self._is_stopping

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return sum(stream.num_open for stream in self._open)

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for anything."""
        return not self._open and not self._calls

    @contextmanager
    def open(
        self, requests: Sequence[Request], *, priority: int = 0, wakes_at_ends: bool = False
    ) -> Iterator[Stream]:
        """Queue requests; those that are not done at the end of the context, or when one of them
        fails, are cancelled. wakes_at_ends: see `Stream`.

        Raises QueueFullError, without any of them queued, and EngineFailedError."""
        self._check_alive()
        waiting = self.num_open - self.stats.num_running
        if waiting + len(requests) > self._max_queued:
            raise QueueFullError(
                f"{waiting} texts are waiting, and at most {self._max_queued} may; try again later"
            )

        def cancel() -> None:
            for number in numbers:
                if self._rows.pop(number, None) is not None:
                    self._send(["cancel", number])

        stream = Stream(len(requests), cancel, wakes_at_ends=wakes_at_ends)
        numbers = [next(self._numbers) for _ in requests]
        self._open.add(stream)
        for index, (number, request) in enumerate(zip(numbers, requests, strict=True)):
            self._rows[number] = (stream, index)
            self._send(["add", number, encoded_request(request), priority])
        try:
            yield stream
        finally:
            self._open.remove(stream)
            cancel()

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """The result of one of the engine's `Calls`, or its error; requests wait meanwhile."""
        self._check_alive()
        number = next(self._numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        self._send(["call", number, name, arguments])
        try:
            return await future
        finally:
            if self._calls.pop(number, None) is not None:
                self._send(["drop", number])

    def give_up(self) -> None:
        """End every open request with an EngineFailedError."""
        self._end_all("the server has ended before this text was complete")

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise EngineFailedError(self._end_of_engine)

    @property
    def _end_of_engine(self) -> str:
        error = self.failure
        if isinstance(error, EngineFailedError):
            return str(error)
        why = "it was stopped" if error is None else f"{type(error).__name__}: {error}"
        return f"the engine has ended: {why}"

    def _end_all(self, message: str) -> None:
        for stream in self._open:
            stream.fail(EngineFailedError(message))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineFailedError(message))

    def _send(self, command: list[Any]) -> None:
        if not self._commands:
            asyncio.get_running_loop().call_soon(self._flush)
        self._commands.append(command)

    def _flush(self) -> None:
        commands, self._commands = self._commands, []
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(framed(commands))

    def take(self, report: Report) -> None:
        """Called with what the engine says."""
        if "stats" in report:
            self.stats = decoded_stats(report["stats"])
        for number, *piece in report.get("pieces", ()):
            if (row := self._rows.get(number)) is not None:
                found = decoded_piece(piece)
                if found.finish_reason is not None:
                    del self._rows[number]
                row[0].put(row[1], found)
        for number, error in report.get("refused", ()):
            if (row := self._rows.pop(number, None)) is not None:
                row[0].fail(decoded_error(error))
        for number, result in report.get("results", ()):
            if (future := self._calls.pop(number, None)) is not None and not future.done():
                future.set_result(result)
        for number, error in report.get("failed_calls", ()):
            if (future := self._calls.pop(number, None)) is not None and not future.done():
                future.set_exception(decoded_error(error))
        if "failure" in report:
            self._fail(decoded_error(report["failure"]))

    def lose(self) -> None:
        """Called when the connection is gone."""
        assert self._ended is not None
        self._ended.set_result(None)
        if not self._is_stopping:
            self._fail(EngineFailedError(f"the engine has ended: {self.why_gone()}"))

    def _fail(self, error: Exception) -> None:
        if self.failure is None:
            self.failure = error
            self._end_all(self._end_of_engine)
            self.on_failure()


class _Receiver(asyncio.Protocol):
    """Of the engine's messages."""

    def __init__(self, service: EngineService) -> None:
        self._service, self._frames = service, Frames()

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        for report in self._frames.take(data):
            self._service.take(report)

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio."""
        self._service.lose()
