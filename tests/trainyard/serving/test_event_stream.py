"""A stream of events is the same whether its chunks are written directly or sent."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Callable

import pytest

from tests.trainyard.serving.running import Running
from trainyard.serving.event_stream import Connection

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
    write, written = Connection.write_chunk, itertools.count()
    direct: list[bool] = []

    def through(may: Callable[[], bool]) -> list[float]:
        def writes(connection: Connection, data: bytes) -> bool:
            direct.append(may() and write(connection, data))
            return direct[-1]

        monkeypatch.setattr(Connection, "write_chunk", writes)
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
