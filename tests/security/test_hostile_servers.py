"""Servers that answer our clients with anything: `stages.generate HOST:PORT`, and load tests.

An answer is shown or refused in one line, steers no terminal, and takes bounded memory."""

from __future__ import annotations

import asyncio
import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from stages.generate import client
from trainyard.errors import InfrastructureError
from trainyard.load_test.driver import LoadDriver
from trainyard.load_test.event_stream import MAX_LINE_BYTES, EventStream
from trainyard.load_test.http_target import HttpTarget
from trainyard.load_test.metrics import summarize
from trainyard.load_test.records import RequestRecord
from trainyard.load_test.workload import PlannedRequest, PromptMaker

ESCAPE = "\x1b]0;owned\x07\u202e"
SECRET = "0123456789abcdef0123"
MIB = 2**20
MOST_CHARS = 400
"""Of what a program says of an answer."""

Answer = bytes | list[bytes]
"""What is sent; the last of a list again and again, until the client has had enough."""


class Hostile(socketserver.ThreadingTCPServer):
    """Sends `answer` to whoever asks."""

    daemon_threads = True
    answer: Answer = b""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Handler(socketserver.StreamRequestHandler):
    server: Hostile

    def handle(self) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n") and (line := self.rfile.readline(65536)):
            head += line
        self.server.heads.append(head)
        length = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-len")]
        self.rfile.read(int(length[0].split(b":")[1]) if length else 0)
        answer = self.server.answer
        with suppress(OSError):
            for piece in [answer] if isinstance(answer, bytes) else answer:
                self.wfile.write(piece)
            while isinstance(answer, list):
                self.wfile.write(answer[-1])


@contextmanager
def hostile(answer: Answer) -> Iterator[Hostile]:
    with Hostile() as server:
        server.answer = answer
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def reply(body: Any, status: str = "200 OK", kind: str = "application/json") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + data


def events(*documents: Any) -> bytes:
    lines = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in documents]
    body = b"".join(b"data: " + line + b"\n\n" for line in lines) + b"data: [DONE]\n\n"
    return reply(body, kind="text/event-stream")


def choice(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"text": "a", **fields}]}


def usage(**counts: Any) -> dict[str, Any]:
    return {**choice(finish_reason="stop"), "usage": counts}


ESCAPED = ESCAPE.encode()
ENDLESS: dict[str, Answer] = {
    "JSON without end": [reply(b"").replace(b"Length: 0", b"Length: 9999999999"), b"[" * MIB],
    "text without end": [b'HTTP/1.1 200 OK\r\n\r\n{"text": ["', b"a" * MIB],
    "an error without end": [b'HTTP/1.1 500 No\r\n\r\n{"message": "', b"a" * MIB],
    "a head without end": [b"HTTP/1.1 200 OK\r\n", b"X: " + b"a" * 1000 + b"\r\n"],
    "an event without end": [
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: ",
        b"a" * MIB,
    ],
}
ANSWERS: dict[str, Answer] = {
    **ENDLESS,
    "nothing": b"",
    "no HTTP": ESCAPED + b"\r\n\r\n",
    "a status of letters": b"HTTP/1.1 OK fine\r\n\r\n",
    "a status that is long": b"HTTP/1.1 200 " + b"a" * 100_000 + b"\r\n\r\n",
    "a reason of escapes": reply({}, f"500 {ESCAPE[:10]}"),
    "a line that is long": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    "a head without a colon": b"HTTP/1.1 200 OK\r\nnothing\r\n\r\n",
    "a length below zero": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nabc",
    "a length of letters": b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\nabc",
    "less than its length": b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}",
    "an error of less than its length": b"HTTP/1.1 400 No\r\nContent-Length: 99\r\n\r\n{}",
    "chunks of letters": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "half a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nabc",
    "gzip that is none": reply(b"abc").replace(b"\r\nConn", b"\r\nContent-Encoding: gzip\r\nConn"),
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "no text": reply({}),
    "a number": reply({"text": 5}),
    "a table of texts": reply({"text": {"a": 1}}),
    "no texts": reply({"text": []}),
    "texts of tables": reply({"text": [{}]}),
    "escapes": reply({"text": [ESCAPE]}),
    "half a character": reply({"text": ["\ud800"]}),
    "a list": reply([]),
    "no UTF-8": reply(b'{"text": ["\xff"]}'),
    "deep": reply(b"[" * 50_000),
    "a long number": reply(b'{"text": ' + b"9" * 50_000 + b"}"),
    "a message of escapes": reply({"message": ESCAPE}, "400 No"),
    "a message of tables": reply({"message": {"a": [ESCAPE]}}, "400 No"),
    "an error of escapes": reply({"error": {"message": ESCAPE}}, "500 No"),
    "an error of pages": reply(b"<html>" + ESCAPED * 20_000, "502 No", "text/html"),
    "events of escapes": events(ESCAPED),
    "events of numbers": events(7),
    "deep events": events(b"[" * 50_000),
    "events of no UTF-8": events(b'"\xff"'),
    "choices of a number": events({"choices": 7}),
    "choices of tables": events({"choices": {"a": 1}}),
    "choices of texts": events({"choices": ["a"]}),
    "a delta of a text": events(choice(text=None, delta="abc")),
    "a delta of a list": events(choice(delta=[1])),
    "an end of escapes": events(choice(finish_reason=ESCAPE * 1000)),
    "an end of tables": events(choice(finish_reason={ESCAPE: [1]})),
    "an error in a stream": events({"error": {"message": ESCAPE * 1000}}),
    "an error that is a number": events({"error": 7}),
    "counts beyond doubles": events(usage(completion_tokens=10**400)),
    "counts below zero": events(usage(completion_tokens=-7, prompt_tokens=-7)),
    "prompts beyond doubles": events(usage(completion_tokens=1, prompt_tokens=10**400)),
    "counts of letters": events(usage(completion_tokens="many", prompt_tokens=[])),
}
each_answer = pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)


def check_shown(words: str) -> None:
    assert all(character.isprintable() or character == "\n" for character in words)


@pytest.mark.few_cases(4)
@each_answer
def test_the_client_of_a_server_shows_an_answer_or_refuses_it_in_a_line(
    answer: Answer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["a prompt", "3"])

    def typed(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", typed)
    with hostile(answer) as server:
        status = client.main([server.address])
    told = capfd.readouterr()
    check_shown(told.out + told.err)
    assert "Traceback" not in told.err
    assert status in (0, InfrastructureError.exit_status)
    if status:
        assert told.err.count("\n") == 1
        assert len(told.err) < MOST_CHARS


def sent(answer: Answer, endpoint: Any = "completions") -> tuple[RequestRecord, str, Hostile]:
    """The record of a request to such a server, and what asking for its model says."""

    async def work(url: str) -> tuple[RequestRecord, str]:
        async with HttpTarget(url, endpoint, "m", {}, seed=1, api_key=SECRET) as target:
            asked = [PlannedRequest(index=0, prompt="a", max_tokens=1)]
            (record,) = await LoadDriver(target, 30).closed_loop(asked, 1)
            try:
                words = await target.served_model()
            except InfrastructureError as error:
                words = str(error)
            return record, words

    with hostile(answer) as server:
        return *asyncio.run(work(f"http://{server.address}")), server


@pytest.mark.few_cases(4)
@each_answer
def test_a_load_test_counts_an_answer_or_an_error_of_a_line(answer: Answer) -> None:
    record, words, _ = sent(answer)
    for told in (record.error or "", record.finish_reason or "", words):
        check_shown(told)
        assert "\n" not in told
        assert len(told) < MOST_CHARS
    json.dumps({**record.document(), **summarize([record])}, allow_nan=False)


REDIRECTS = ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("status", REDIRECTS)
def test_a_redirect_leads_to_no_other_server(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would get the key and the prompts."""
    monkeypatch.setenv(client.KEY, SECRET)
    with hostile(reply({"text": ["a"]})) as other:
        place = f"Location: http://localhost:{other.server_address[1]}/\r\n"
        away = f"HTTP/1.1 {status}\r\n{place}Content-Length: 0\r\n\r\n".encode()
        for endpoint in ("completions", "chat"):
            record, words, _ = sent(away, endpoint)
            assert record.error == f"HTTP {status[:3]}"
            assert f"answers HTTP {status[:3]}" in words
        with hostile(away) as server, pytest.raises(InfrastructureError, match="no server of text"):
            client.ask(f"http://{server.address}/api", {"prompts": ["a"]})
        assert SECRET.encode() in server.heads[0]
        assert other.heads == []


def test_a_long_line_of_small_pieces_takes_linear_time() -> None:
    """16 MiB in 16,384 pieces: copied again for each, they would be 128 GiB."""
    events, piece = EventStream(), b"a" * 1024
    for _ in range(MAX_LINE_BYTES // 1024):
        assert events.feed(piece) == []
    with pytest.raises(ValueError, match="a line of more than"):
        events.feed(piece)


def test_a_trace_makes_no_more_tokens_than_its_prompt_has() -> None:
    """A line may name any number of blocks, of 512 tokens each."""
    maker = PromptMaker([5, 6, 7], seed=1)
    many = maker.of_blocks(range(10**7), 0, 600)
    assert many == maker.of_blocks([0, 1], 0, 600)
    assert len(many) == 600
