"""An engine in a thread of its own, and requests of one event loop on it.

The thread alone touches the engine. Commands come to it by a queue; what a step made goes back to
the loop in one call per step. If the engine raises, every open request gets the error, and
`on_failure` is called: an engine that failed is not used again."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from trainyard.errors import InfrastructureError, TrainyardError
from trainyard.inference.engine import Engine, EngineStats, Update
from trainyard.inference.request import BrokenOutputError, FinishReason, Request, TopTokens

log = logging.getLogger(__name__)

T = TypeVar("T")

IDLE_SECONDS = 1.0
"""Between steps without work, by which ranks that follow know that the first one is alive."""


class QueueFullError(TrainyardError):
    """As many requests wait as may."""


class EngineFailedError(InfrastructureError):
    """The engine has ended with an error."""


@dataclass(slots=True, kw_only=True)
class Piece:
    """What a step added to an output. A copy: the engine continues the completion."""

    tokens: list[int]
    log_probs: list[float]
    """Of these tokens; empty unless asked for, as `top`."""
    top: list[TopTokens]
    finish_reason: FinishReason | None
    prompt_log_probs: list[float]
    """In the first piece of a request that asks for them, as `prompt_top`."""
    prompt_top: list[TopTokens]

    def then(self, later: Piece) -> Piece:
        """This piece and the next one of the same request as one, in the lists of this one."""
        self.tokens.extend(later.tokens)
        self.log_probs.extend(later.log_probs)
        self.top.extend(later.top)
        return Piece(
            tokens=self.tokens,
            log_probs=self.log_probs,
            top=self.top,
            finish_reason=later.finish_reason,
            prompt_log_probs=self.prompt_log_probs,
            prompt_top=self.prompt_top,
        )


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


@dataclass(slots=True, eq=False)
class _Row:
    """One request, for the engine's thread."""

    stream: Stream
    index: int
    number: int | None = None
    """That the engine gave it; None before it is added and after its end."""
    is_first: bool = True
    """Whether it has no piece yet."""


Delivery = Sequence[tuple[_Row, Piece | Exception]]


class EngineService:
    """Requests of an event loop on an engine; `start` and all but the thread run on that loop."""

    def __init__(self, engine: Engine, *, max_queued: int) -> None:
        """max_queued: requests that may wait for their turn."""
        self._engine, self._max_queued = engine, max_queued
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._rows: dict[int, _Row] = {}
        self._refused: list[tuple[_Row, Exception]] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._is_ending = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.max_tokens = engine.max_tokens
        self.stats: EngineStats = engine.stats()
        """Of the last step."""
        self._sent_stats = self.stats
        self._open: set[Stream] = set()
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None

    # --- on the loop --------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine's thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread; requests that are open get no more."""
        self._commands.put(self._end)
        await asyncio.to_thread(self._thread.join)

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs."""
        return self.failure is None and self._thread.is_alive()

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return sum(stream.num_open for stream in self._open)

    @property
    def is_idle(self) -> bool:
        """Whether a stream has no reader."""
        return not self._open

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
            for row in rows:
                self._commands.put(partial(self._cancel, row))

        stream = Stream(len(requests), cancel, wakes_at_ends=wakes_at_ends)
        rows = [_Row(stream, index) for index in range(len(requests))]
        self._open.add(stream)
        for row, request in zip(rows, requests, strict=True):
            self._commands.put(partial(self._add, row, request, priority))
        try:
            yield stream
        finally:
            self._open.remove(stream)
            cancel()

    def give_up(self) -> None:
        """End every open request with an EngineFailedError."""
        for stream in self._open:
            stream.fail(EngineFailedError("the server has ended before this text was complete"))

    async def run_alone(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises, run between two steps; others wait meanwhile."""
        self._check_alive()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def give(result: T | None, error: Exception | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def command() -> None:
            if future.cancelled():
                return
            try:
                result = work()
            except Exception as error:
                loop.call_soon_threadsafe(give, None, error)
            else:
                loop.call_soon_threadsafe(give, result, None)

        self._commands.put(command)
        return await future

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise EngineFailedError(f"the engine has ended: {self.failure or 'it was stopped'}")

    def _dispatch(self, delivery: Delivery, stats: EngineStats) -> None:
        self.stats = stats
        for row, piece in delivery:
            if isinstance(piece, Exception):
                row.stream.fail(piece)
            else:
                row.stream.put(row.index, piece)

    def _take_failure(self, error: BaseException, rows: Sequence[_Row]) -> None:
        self.failure = error
        for row in rows:
            message = f"the engine has ended: {type(error).__name__}: {error}"
            row.stream.fail(EngineFailedError(message))
        self.on_failure()

    # --- in the engine's thread ---------------------------------------------------------------

    def _run(self) -> None:
        assert self._loop is not None
        try:
            while not self._is_ending:
                self._take_commands()
                updates = [] if self._is_ending else self._engine.step()
                delivery: Delivery = [*self._refused, *self._pieces(updates)]
                self._refused.clear()
                stats = self._engine.stats()
                if delivery or stats != self._sent_stats:  # a request may also have been cancelled
                    self._sent_stats = stats
                    self._loop.call_soon_threadsafe(self._dispatch, delivery, stats)
        except BaseException as error:
            log.exception("the engine failed")
            waiting = [*self._rows.values(), *(row for row, _ in self._refused)]
            self._loop.call_soon_threadsafe(self._take_failure, error, waiting)

    def _take_commands(self) -> None:
        """Run all commands, and wait for one if there is nothing to compute."""
        try:
            if not self._engine.has_work():
                self._commands.get(timeout=IDLE_SECONDS)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _end(self) -> None:
        self._is_ending = True

    def _add(self, row: _Row, request: Request, priority: int) -> None:
        try:
            row.number = self._engine.add(request, priority=priority)
        except TrainyardError as error:
            self._refused.append((row, error))
        else:
            self._rows[row.number] = row

    def _cancel(self, row: _Row) -> None:
        if row.number is not None:
            self._engine.cancel(row.number)
            del self._rows[row.number]
            row.number = None

    def _pieces(self, updates: Sequence[Update]) -> Iterator[tuple[_Row, Piece | Exception]]:
        for update in updates:
            row = self._rows.get(update.number)
            if row is None:
                continue
            is_first, row.is_first = row.is_first, False
            if update.completion.is_done:
                del self._rows[update.number]
                row.number = None
            if update.completion.is_broken:
                yield row, BrokenOutputError()
            else:
                yield row, _piece(update, is_first)


def _piece(update: Update, is_first: bool) -> Piece:
    """A copy of what is new. is_first: with the scores of the prompt."""
    completion, begin = update.completion, len(update.completion.tokens) - update.num_new
    return Piece(
        tokens=completion.tokens[begin:],
        log_probs=completion.log_probs[begin:],
        top=completion.top[begin:],
        finish_reason=completion.finish_reason,
        prompt_log_probs=list(completion.prompt_log_probs) if is_first else [],
        prompt_top=list(completion.prompt_top) if is_first else [],
    )
