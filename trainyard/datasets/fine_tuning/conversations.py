"""Reads conversations from the lines of a JSONL file, by number.

A line is an object whose key "messages" is a list of {"role", "content"}. The beginnings of lines
are found once; a line is read and checked on access. Errors name file, line and byte."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.artifacts import inputs, store
from trainyard.corpus.indexed import map_file
from trainyard.errors import DataError

Message = dict[str, Any]
"""A turn: "role", "content", and other keys of the line."""

KEY = "messages"
NEWLINE = 10
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BLOCK = 1 << 24
EXCERPT = 60


class ConversationFile:
    """The lines of one JSONL file that are not blank.

    A remote file is first copied to the folder `cache`, unless it is there already, or to a
    temporary folder of this object. Takes 16 bytes of memory per line, and pickles as its URL."""

    def __init__(self, url: str, cache: Path | None = None) -> None:
        if not url.endswith((".jsonl", ".json")):
            raise DataError(
                f"{url}: conversations must be in uncompressed .jsonl files; unpack or convert it"
            )
        self.url = url
        self._cache = cache
        if cache is None and not store.is_local(url):
            self._temporary = tempfile.TemporaryDirectory(prefix="trainyard-chat-")
            cache = Path(self._temporary.name)
        self._bytes: NDArray[np.uint8] = map_file(inputs.fetch(url, cache or Path()))
        self._begins, self._numbers = find_lines(self._bytes)
        if not len(self._begins):
            raise DataError(f"{url} has no lines, so no conversations")

    def __reduce__(self) -> tuple[Callable[..., ConversationFile], tuple[str, Path | None]]:
        return ConversationFile, (self.url, self._cache)

    def __len__(self) -> int:
        """Lines that are not blank."""
        return len(self._begins)

    def where(self, index: int) -> str:
        """File, line and byte of a line, for errors."""
        begin, number = int(self._begins[index]), int(self._numbers[index])
        return f"{self.url}: line {number} (byte {begin})"

    def __getitem__(self, index: int) -> list[Message]:
        """The messages of a line."""
        begin = int(self._begins[index])
        line = self._line(begin)
        try:
            return parse_messages(line)
        except ValueError as fault:
            begins = line[:EXCERPT].decode(errors="backslashreplace")
            raise DataError(f"{self.where(index)}: {fault}; it begins {begins!r}") from None

    def _line(self, begin: int) -> bytes:
        step = 1 << 12
        while True:
            piece = self._bytes[begin : begin + step].tobytes()
            end = piece.find(b"\n")
            if end >= 0:
                return piece[:end]
            if len(piece) < step:
                return piece
            step *= 4


def parse_messages(line: bytes) -> list[Message]:
    """The messages of a line. Raises ValueError, which says what is wrong."""
    try:
        record = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {error.start} of the line") from None
    if not isinstance(record, dict):
        raise ValueError(f"not an object but {type(record).__name__}")
    messages = record.get(KEY)
    if messages is None:
        raise ValueError(f"no key {KEY!r} among its {sorted(record)[:8]}")
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{KEY!r} is not a list of messages, or is empty")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} is not an object with a role")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"the content of message {number} is not a string")
    return messages


def find_lines(data: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(n,) where each line that is not blank begins, and its number from 1."""
    mark = len(BYTE_ORDER_MARK) if data[:3].tobytes() == BYTE_ORDER_MARK else 0
    ends = [
        start + np.flatnonzero(data[start : start + BLOCK] == NEWLINE)
        for start in range(0, len(data), BLOCK)
    ]
    begins = np.concatenate([np.array([mark], np.int64), *(end + 1 for end in ends)])
    begins = begins[begins < len(data)]
    kept = np.ones(len(begins), bool)
    for line in np.flatnonzero(data[begins] <= ord(" ")).tolist():  # few begin with a blank
        end = begins[line + 1] if line + 1 < len(begins) else len(data)
        kept[line] = bool(data[begins[line] : end].tobytes().strip())
    return begins[kept], 1 + np.flatnonzero(kept)


def split_conversations(messages: list[Message]) -> list[list[Message]]:
    """The conversations of a line: a system turn begins a new one."""
    conversations: list[list[Message]] = []
    for message in messages:
        if not conversations or message["role"] == "system":
            conversations.append([])
        conversations[-1].append(message)
    return conversations
