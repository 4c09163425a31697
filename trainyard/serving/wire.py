"""What a server and its engine say to each other over a socket, as they are two processes.

A message is JSON behind its length, of plain values: nothing of a client is executed on the way.
To the engine go lists of commands

    ["add", number, request, priority]    ["cancel", number]    ["end"]
    ["call", number, name, arguments]     ["drop", number]

and from it comes, after each step that changed something, a document with the keys of `Report`.
Numbers are the server's. No torch."""

from __future__ import annotations

import json
import select
import socket
import struct
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from trainyard import errors
from trainyard.errors import TrainyardError, lack_of_memory
from trainyard.inference.config import SamplingConfig
from trainyard.inference.engine import EngineStats
from trainyard.inference.request import BrokenOutputError, FinishReason, Request, TopTokens
from trainyard.inference.stop_words import LineEnds, StopWords
from trainyard.tokenizers.base import Tokenizer

LENGTH = struct.Struct("<I")
READ_BYTES = 2**18
SAMPLING = tuple(field.name for field in fields(SamplingConfig))
STATS = tuple(field.name for field in fields(EngineStats))
PLAIN = ("max_tokens", "number", "min_tokens", "log_probs", "prompt_log_probs", "top_n")
"""Fields of a request that are sent as they are."""


class ConnectionLost(Exception):  # noqa: N818  # the other process has ended
    """The other side has closed the connection, or is gone."""


@dataclass(slots=True, kw_only=True)
class Piece:
    """What a step added to an output."""

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


Error = tuple[str, str]
"""Class and message."""


class Report(TypedDict, total=False):
    """What became of requests and calls since the last one."""

    pieces: list[list[Any]]
    """[number, *`encoded_piece`]."""
    refused: list[tuple[int, Error]]
    """Requests that end with an error."""
    results: list[tuple[int, Any]]
    """Of calls."""
    failed_calls: list[tuple[int, Error]]
    stats: list[int]
    """If they changed; in the order of STATS."""
    failure: Error
    """The engine has ended with it."""


# --- values -----------------------------------------------------------------------------------


def encoded_request(request: Request) -> dict[str, Any]:
    """What `decoded_request` takes. The functions of a request may be `StopWords` and
    `LineEnds`."""
    document = {name: getattr(request, name) for name in PLAIN}
    document["prompt"] = list(request.prompt)
    document["stop_ids"] = sorted(request.stop_ids)
    document["sampling"] = {name: getattr(request.sampling, name) for name in SAMPLING}
    if request.is_stop is not None:
        assert isinstance(request.is_stop, StopWords)
        document["stop_words"] = request.is_stop.words
    document["line_ends"] = request.banned_after is not None
    return document


def decoded_request(document: dict[str, Any], tokenizer: Tokenizer, line_ends: LineEnds) -> Request:
    """line_ends: of this tokenizer, which all requests share."""
    words = document.get("stop_words")
    return Request(
        prompt=document["prompt"],
        sampling=SamplingConfig(**document["sampling"]),
        stop_ids=frozenset(document["stop_ids"]),
        is_stop=None if words is None else StopWords(tokenizer, words),
        banned_after=line_ends if document["line_ends"] else None,
        **{name: document[name] for name in PLAIN},
    )


def encoded_piece(piece: Piece) -> list[Any]:
    """Most have tokens alone, and are short."""
    row: list[Any] = [piece.tokens, piece.finish_reason]
    scores = [piece.log_probs, piece.top, piece.prompt_log_probs, piece.prompt_top]
    return row + scores if any(scores) else row


def decoded_piece(row: list[Any]) -> Piece:
    """The piece of `encoded_piece`."""
    log_probs, top, prompt_log_probs, prompt_top = row[2:] or ([], [], [], [])
    return Piece(
        tokens=row[0],
        finish_reason=row[1],
        log_probs=log_probs,
        top=_places(top),
        prompt_log_probs=prompt_log_probs,
        prompt_top=_places(prompt_top),
    )


def _places(rows: list[list[list[Any]]]) -> list[TopTokens]:
    return [[(token, value) for token, value in row] for row in rows]


def encoded_stats(stats: EngineStats) -> list[int]:
    """In the order of STATS."""
    return [getattr(stats, name) for name in STATS]


def decoded_stats(row: list[int]) -> EngineStats:
    """The figures of `encoded_stats`."""
    return EngineStats(**dict(zip(STATS, row, strict=True)))


KINDS: dict[str, type[TrainyardError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, TrainyardError)
}


def encoded_error(error: BaseException) -> Error:
    """As its nearest class that is known here; a defect by its own name."""
    if isinstance(error, BrokenOutputError):
        return BrokenOutputError.__name__, str(error)
    if (lack := lack_of_memory(error)) is not None:
        return lack.__name__, str(error)
    names = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ in KINDS]
    return (names or [type(error).__name__])[0], str(error)


def decoded_error(error: Error) -> Exception:
    """The error of `encoded_error`; a defect is a RuntimeError."""
    name, message = error
    if name == BrokenOutputError.__name__:
        return BrokenOutputError()
    if name in KINDS:
        return KINDS[name](message)
    return RuntimeError(message if name == RuntimeError.__name__ else f"{name}: {message}")


# --- messages ---------------------------------------------------------------------------------


def framed(document: object) -> bytes:
    """A message."""
    data = json.dumps(document, separators=(",", ":")).encode()
    return LENGTH.pack(len(data)) + data


class Frames:
    """Messages from bytes as they come."""

    def __init__(self) -> None:
        self._data = bytearray()

    def take(self, data: bytes) -> list[Any]:
        """The messages that these bytes complete."""
        self._data += data
        found, begin = [], 0
        while len(self._data) - begin >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._data, begin)
            end = begin + LENGTH.size + length
            if len(self._data) < end:
                break
            found.append(json.loads(self._data[begin + LENGTH.size : end]))
            begin = end
        del self._data[:begin]
        return found


class Channel:
    """One end of a connection, for a thread that may wait."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._socket, self._frames = connection, Frames()
        self._kept: list[Any] = []
        """Messages that came with the one that `receive_one` returned."""
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def send(self, document: object) -> None:
        """Send a message. ConnectionLost if nobody will read it."""
        try:
            self._socket.sendall(framed(document))
        except OSError as error:
            raise ConnectionLost from error

    def receive(self, seconds: float | None) -> list[Any]:
        """All messages that have come; waits so long for one, None: without an end.

        ConnectionLost if no more can come."""
        found, self._kept = self._kept, []
        if found:
            return found
        wait = None if seconds is None else 1000 * seconds
        while self._poll.poll(wait):
            if not (data := self._read()):
                if found:
                    break  # the last messages are for the caller, who hears of the end next time
                raise ConnectionLost
            found += self._frames.take(data)
            wait = 0 if found or seconds is not None else None
        return found

    def _read(self) -> bytes:
        """What has come; nothing at the end."""
        try:
            return self._socket.recv(READ_BYTES)
        except ConnectionError:
            return b""

    def receive_one(self) -> Any:
        """The first message of a conversation, whose answer the other side awaits."""
        found, *self._kept = self.receive(None)
        return found

    def close(self) -> None:
        """Say that no more comes."""
        self._socket.close()
