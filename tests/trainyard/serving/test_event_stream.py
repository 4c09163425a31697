"""A stream of events is the same whether its chunks are written directly or sent, and ends well
with clients that are slow or leave, and with the server."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import socket
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from tests.trainyard.serving.running import Running
from trainyard.serving.event_stream import Chunks, Connection, EventResponse

pytestmark = pytest.mark.slow

ASKED = {"prompt": "ab", "max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
STREAMED = {**ASKED, "stream": True}


def scores(events: str) -> list[float]:
    """Log-probabilities of all tokens; a slow reader gets several in an event."""
    lines = [line.removeprefix("data: ") for line in events.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    found = [json.loads(line)["choices"][0]["logprobs"]["token_logprobs"] for line in lines]
    return list(itertools.chain.from_iterable(found))


def over_http_1_0(server: Running) -> str:
    """An answer whose end is that of its connection."""
    body = json.dumps(STREAMED).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        parts = iter(lambda: client.recv(4096), b"")
        head, _, answer = b"".join(parts).partition(b"\r\n\r\n")
    assert b" 200 " in head.splitlines()[0]
    assert b"chunked" not in head.lower()
    return answer.decode()


def test_events_are_the_same_by_either_way_and_without_chunks(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = Chunks.write, itertools.count()
    direct: list[bool] = []

    def through(may: Callable[[], bool]) -> list[float]:
        def writes(chunks: Chunks, data: bytes) -> bool:
            direct.append(may() and write(chunks, data))
            return direct[-1]

        monkeypatch.setattr(Chunks, "write", writes)
        server.client.close()  # what a connection may do is decided when it is made
        server.begin(server.url)
        return scores(server.post("/v1/completions", **STREAMED).text)

    answer = server.post("/v1/completions", **ASKED).json()
    wanted = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert len(wanted) == 12
    assert through(lambda: False) == wanted
    assert not any(direct)
    assert through(lambda: next(written) % 2 == 0) == wanted
    direct.clear()
    assert through(lambda: True) == wanted
    assert all(direct)
    direct.clear()
    assert scores(over_http_1_0(server)) == wanted
    assert not any(direct)


# --- clients that are slow or leave, and a server that ends ------------------------------------

EVENT = b"data: " + 1000 * b"x" + b"\n\n"
COUNT = 300
SMALL_BUFFER = 4096


class Streaming:
    """A server in this loop whose only answer is a stream of `COUNT` events, and a client."""

    def __init__(self, seconds: float) -> None:
        """seconds: between events."""
        self._seconds = seconds
        self.made = 0
        self.is_over = asyncio.Event()
        """The stream has ended or was given up."""

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        await EventResponse(self._events(), scope)(scope, receive, send)

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            for self.made in range(1, COUNT + 1):
                yield EVENT
                await asyncio.sleep(self._seconds)
        finally:
            self.is_over.set()

    async def begin(self) -> None:
        """Serve, and ask for the stream; the kernel keeps little between the two ends."""
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
        config = uvicorn.Config(
            self.app, interface="asgi3", http=Connection, lifespan="off", log_config=None
        )
        self.server = uvicorn.Server(config)
        self.serving = asyncio.create_task(self.server.serve([listening]))
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, listening.getsockname())
        self.reader, self.writer = await asyncio.open_connection(sock=client, limit=SMALL_BUFFER)
        self.writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await self.reader.readuntil(b"\r\n\r\n")
        (self.connection,) = self.server.server_state.connections

    async def chunk(self) -> bytes:
        """The next one; the last is empty."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def chunks(self) -> list[bytes]:
        """All that are left but for the last."""
        found = []
        while chunk := await self.chunk():
            found.append(chunk)
        return found


@asynccontextmanager
async def streaming(seconds: float = 0) -> AsyncIterator[Streaming]:
    async with asyncio.timeout(20):
        found = Streaming(seconds)
        await found.begin()
        try:
            yield found
        finally:
            found.writer.close()
            found.server.should_exit = True
            await found.serving


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What each `Chunks.write` said; none writes to a connection that closes."""
    write, said = Chunks.write, []

    def writes(chunks: Chunks, data: bytes) -> bool:
        is_closing = chunks._transport.is_closing()
        said.append(write(chunks, data))
        assert not (said[-1] and is_closing)
        return said[-1]

    monkeypatch.setattr(Chunks, "write", writes)
    return said


def test_a_stream_waits_for_a_slow_reader_who_gets_all_of_it(direct: list[bool]) -> None:
    async def read_late() -> None:
        async with streaming() as one:
            while not one.connection.flow.write_paused:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            made = one.made
            await asyncio.sleep(0.05)
            assert one.made == made < COUNT, "it waits"
            assert (direct[0], direct[-1]) == (True, False)
            assert await one.chunks() == COUNT * [EVENT]
            assert direct.count(True) > direct.count(False) > 0

    asyncio.run(read_late())


@pytest.mark.parametrize("is_slow", [False, True])
def test_who_leaves_in_mid_stream_ends_it(is_slow: bool, direct: list[bool]) -> None:
    async def leave() -> None:
        async with streaming(0 if is_slow else 0.01) as one:
            assert await one.chunk() == EVENT
            while is_slow and not one.connection.flow.write_paused:
                await asyncio.sleep(0.01)
            one.writer.transport.abort()
            await one.is_over.wait()
            assert one.made < COUNT
            assert not one.server.server_state.connections
            assert not Chunks(one.connection).write(EVENT)
            said = len(direct)
            await asyncio.sleep(0.05)
            assert len(direct) == said

    asyncio.run(leave())


def test_a_server_that_ends_completes_its_streams(direct: list[bool]) -> None:
    async def end() -> None:
        async with streaming(0.001) as one:
            first = await one.chunk()
            one.server.should_exit = True
            assert [first, *await one.chunks()] == COUNT * [EVENT]
            assert await one.reader.read() == b"", "the connection ends with the stream"
            await one.serving
            assert direct.count(True) > COUNT / 2

    asyncio.run(end())


@contextmanager
def without_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_a_closed_connection_is_freed_at_once() -> None:
    async def close() -> None:
        async with streaming() as one:
            await one.chunks()
            found = weakref.ref(one.connection)
            del one.connection
            one.writer.close()
            while found() is not None:
                await asyncio.sleep(0.01)

    with without_collector():
        asyncio.run(close())
