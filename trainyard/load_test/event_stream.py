"""Server-sent events, as OpenAI's interface streams: lines `data: DOCUMENT`, the last `[DONE]`.

Pure: bytes in, documents out."""

from __future__ import annotations

from typing import Any

from trainyard import json_text

DONE = "[DONE]"
MAX_LINE_BYTES = 16 * 2**20


class EventStream:
    """Cuts a stream of bytes into events; `feed` takes it in pieces of any size."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        """Pieces of a line that has not ended, joined once it has: else each piece would copy all
        that came before it."""
        self._rest_bytes = 0
        self.is_done = False
        """Whether the server said that the stream is whole."""

    def feed(self, piece: bytes) -> list[Any]:
        """The documents of the events that are whole now. ValueError for what is no event stream of
        JSON."""
        lines: list[bytes] = []
        if b"\n" in piece:
            *lines, piece = b"".join([*self._rest, piece]).split(b"\n")
            self._rest, self._rest_bytes = [], 0
        self._rest.append(piece)
        self._rest_bytes += len(piece)
        if self._rest_bytes > MAX_LINE_BYTES:
            raise ValueError(f"a line of more than {MAX_LINE_BYTES} bytes")
        documents = []
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # other fields, comments that keep a connection open, empty lines
            text = line[len(b"data:") :].decode().strip()
            if text == DONE:
                self.is_done = True
            elif text:
                documents.append(json_text.loads(text))
        return documents
