"""The engine's side of the connection to a server: takes requests, steps, reports.

It has the engine to itself, as the only thread of a process (`stages.serve.engine`), or one thread
of a process that also asks (`engine_in_thread`)."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from trainyard.errors import TrainyardError
from trainyard.inference.engine import Engine, Update
from trainyard.inference.request import BrokenOutputError
from trainyard.inference.stop_words import LineEnds
from trainyard.serving.wire import (
    Channel,
    ConnectionLost,
    Piece,
    Report,
    decoded_request,
    encoded_error,
    encoded_piece,
    encoded_stats,
)
from trainyard.tokenizers.base import Tokenizer

log = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
"""Between steps without work, by which ranks that follow know that the first one is alive."""

Calls = Mapping[str, Callable[..., Any]]
"""What the engine does beside requests, by name: takes and returns values of JSON."""


class EngineSide:
    """Runs an engine for whoever is at the other end of a channel."""

    def __init__(
        self, engine: Engine, channel: Channel, tokenizer: Tokenizer, calls: Calls | None = None
    ) -> None:
        """calls: each runs between two steps; requests wait meanwhile."""
        self._engine, self._channel, self._tokenizer = engine, channel, tokenizer
        self._calls: Calls = calls or {}
        self._line_ends = LineEnds(tokenizer)
        self._theirs: dict[int, int] = {}
        """The server's number of a request, by the engine's."""
        self._ours: dict[int, int] = {}
        """The engine's, by the server's."""
        self._begun: set[int] = set()
        """Requests, by the engine's number, that have a piece."""
        self._waiting: dict[int, tuple[str, dict[str, Any]]] = {}
        """Calls that have not run."""
        self._report = Report()
        self._sent_stats = encoded_stats(engine.stats())
        self._is_ending = False

    def run(self) -> None:
        """Serve until the other side says so, or is gone. An error of the engine is reported, and
        raised."""
        try:
            while self._take_commands():
                self._call_next()
                self._take_updates(self._engine.step())
                self._send()
        except ConnectionLost:
            log.warning("the server is gone; the engine ends")
        except BaseException as error:
            log.exception("the engine failed")
            self._channel.send(Report(failure=encoded_error(error)))
            raise

    def _take_commands(self) -> bool:
        """Do what the other side wants, and wait for that if there is nothing to compute. False at
        the end."""
        is_busy = self._engine.has_work() or self._waiting
        for commands in self._channel.receive(0 if is_busy else IDLE_SECONDS):
            for name, *arguments in commands:
                getattr(self, f"_on_{name}")(*arguments)
        return not self._is_ending

    def _on_add(self, number: int, document: dict[str, Any], priority: int) -> None:
        request = decoded_request(document, self._tokenizer, self._line_ends)
        try:
            ours = self._engine.add(request, priority=priority)
        except TrainyardError as error:
            self._report.setdefault("refused", []).append((number, encoded_error(error)))
        else:
            self._ours[number], self._theirs[ours] = ours, number

    def _on_cancel(self, number: int) -> None:
        if (ours := self._ours.get(number)) is not None:
            self._engine.cancel(ours)
            self._forget(ours)

    def _on_call(self, number: int, name: str, arguments: dict[str, Any]) -> None:
        self._waiting[number] = (name, arguments)

    def _on_drop(self, number: int) -> None:
        self._waiting.pop(number, None)

    def _on_end(self) -> None:
        self._is_ending = True

    def _call_next(self) -> None:
        if not self._waiting:
            return
        number = next(iter(self._waiting))
        name, arguments = self._waiting.pop(number)
        try:
            result = self._calls[name](**arguments)
        except Exception as error:
            if not isinstance(error, TrainyardError):
                log.exception("%s failed", name)
            self._report.setdefault("failed_calls", []).append((number, encoded_error(error)))
        else:
            self._report.setdefault("results", []).append((number, result))

    def _take_updates(self, updates: Sequence[Update]) -> None:
        for update in updates:
            number = self._theirs.get(update.number)
            if number is None:
                continue
            is_first = update.number not in self._begun
            self._begun.add(update.number)
            if update.completion.is_done:
                self._forget(update.number)
            if update.completion.is_broken:
                broken = (number, encoded_error(BrokenOutputError()))
                self._report.setdefault("refused", []).append(broken)
            else:
                row = [number, *encoded_piece(_piece(update, is_first))]
                self._report.setdefault("pieces", []).append(row)

    def _forget(self, ours: int) -> None:
        del self._ours[self._theirs.pop(ours)]
        self._begun.discard(ours)

    def _send(self) -> None:
        """What is new; a cancelled request changes the figures alone."""
        stats = encoded_stats(self._engine.stats())
        if stats != self._sent_stats:
            self._report["stats"] = self._sent_stats = stats
        if self._report:
            self._channel.send(self._report)
            self._report = Report()


def _piece(update: Update, is_first: bool) -> Piece:
    """What is new. is_first: with the scores of the prompt."""
    completion, begin = update.completion, len(update.completion.tokens) - update.num_new
    return Piece(
        tokens=completion.tokens[begin:],
        log_probs=completion.log_probs[begin:],
        top=completion.top[begin:],
        finish_reason=completion.finish_reason,
        prompt_log_probs=completion.prompt_log_probs if is_first else [],
        prompt_top=completion.prompt_top if is_first else [],
    )


@contextmanager
def engine_in_thread(
    engine: Engine, tokenizer: Tokenizer, calls: Calls | None = None
) -> Iterator[socket.socket]:
    """A connection to an engine in a thread of this process, which ends with the context."""
    ours, theirs = socket.socketpair()

    def run() -> None:
        with theirs, suppress(Exception):  # the other side knows, and says so
            EngineSide(engine, Channel(theirs), tokenizer, calls).run()

    thread = threading.Thread(target=run, name="engine", daemon=True)
    thread.start()
    try:
        yield ours
    finally:
        ours.close()
        thread.join()
