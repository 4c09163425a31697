"""Answers of server-sent events, with as little work for each as can be: a stream has one for each
token, and what they cost is taken from the engine where cores are few."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

from fastapi.responses import StreamingResponse
from starlette.types import Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
WRITE = "trainyard.write_chunk"
"""Key of `Chunks.write` of a connection in the state of a scope."""

Write: TypeAlias = Callable[[bytes], bool]


class Connection(H11Protocol):
    """A connection that lets an answer write its chunks. h11 and the layers of an application take
    longer for one than all that makes its text."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(transport)
        # Not a method of this object, which has the state and the scopes with it: only the cycle
        # collector would free it then.
        self.app_state = {**self.app_state, WRITE: Chunks(self).write}


class Chunks:
    """Where the answers of one connection write their chunks."""

    def __init__(self, connection: H11Protocol) -> None:
        self._transport, self._flow = connection.transport, connection.flow
        self._conn = connection.conn

    def write(self, data: bytes) -> bool:
        """Write a part of an answer whose head has been sent, and which has no length. False, and
        nothing is written, if `send` has to: the client is slow or gone, or knows no chunks."""
        if self._flow.write_paused or self._transport.is_closing():
            return False
        if self._conn.their_http_version != b"1.1":
            return False
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class EventResponse(StreamingResponse):
    """A stream of events; each is whole in its bytes."""

    def __init__(self, events: AsyncIterator[bytes], scope: Scope) -> None:
        super().__init__(events, media_type="text/event-stream", headers=HEADERS)
        self._write: Write = scope.get("state", {}).get(WRITE, _never)

    async def stream_response(self, send: Send) -> None:
        """See `StreamingResponse`."""
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        async for event in self.body_iterator:
            assert isinstance(event, bytes)
            if not self._write(event):
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _never(data: bytes) -> bool:
    """On other servers, such as those of tests."""
    return False
