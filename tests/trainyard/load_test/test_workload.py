"""Requests of options, seeds and traces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainyard.errors import DataError
from trainyard.load_test.event_stream import MAX_LINE_BYTES, EventStream
from trainyard.load_test.lengths import parse_lengths
from trainyard.load_test.workload import (
    BLOCK_TOKENS,
    PromptMaker,
    read_trace,
    synthetic_requests,
    text_requests,
    trace_requests,
)

ORDINARY = [2, 3, 5, 7, 11, 13, 17, 19]
FIVE = parse_lengths("5", "")


def trace(*lines: dict[str, Any]) -> bytes:
    return "\n".join(map(json.dumps, lines)).encode()


def test_synthetic_requests_follow_from_the_seed() -> None:
    inputs, outputs = parse_lengths("uniform:3:9", ""), parse_lengths("uniform:1:4", "")

    def made(seed: int, count: int = 20) -> list[Any]:
        return synthetic_requests(count, PromptMaker(ORDINARY, seed), inputs, outputs, seed)

    requests = made(1)
    assert requests == made(1)
    assert requests != made(2)
    assert [request.index for request in requests] == list(range(20))
    assert {len(request.prompt) for request in requests} == set(range(3, 10))
    assert {request.max_tokens for request in requests} == {1, 2, 3, 4}
    assert all(token in ORDINARY for request in requests for token in request.prompt)
    assert len({request.prompt for request in requests}) == 20


def test_prompts_come_again_after_the_last() -> None:
    requests = text_requests(5, ["a", "b"], FIVE, 1)
    assert [request.prompt for request in requests] == ["a", "b", "a", "b", "a"]
    assert [request.max_tokens for request in requests] == [5] * 5


def test_a_trace_is_replayed_from_its_first_request_on() -> None:
    content = trace(
        {"timestamp": 3000, "input_length": 7, "output_length": 2},
        {"timestamp": 1000, "text_input": "first"},
    )
    lines = read_trace(content + b"\n\n", "a.jsonl")
    assert [line.at for line in lines] == [0.0, 2.0]
    requests = trace_requests(lines, PromptMaker(ORDINARY, 1), FIVE, 1)
    assert [request.max_tokens for request in requests] == [5, 2]
    assert requests[0].prompt == "first"
    assert len(requests[1].prompt) == 7


def test_equal_blocks_of_a_trace_are_equal_tokens() -> None:
    length = 2 * BLOCK_TOKENS + 10
    content = trace(
        {"timestamp": 0, "input_length": length, "hash_ids": [4, 6]},
        {"timestamp": 1, "input_length": length, "hash_ids": [4, 9]},
        {"timestamp": 2, "input_length": 100, "hash_ids": [4]},
    )
    lines = read_trace(content, "a.jsonl")
    a, b, c = (r.prompt for r in trace_requests(lines, PromptMaker(ORDINARY, 1), FIVE, 1))
    assert (len(a), len(b), len(c)) == (length, length, 100)
    assert a[:BLOCK_TOKENS] == b[:BLOCK_TOKENS]
    assert a[:100] == c
    assert a[BLOCK_TOKENS : 2 * BLOCK_TOKENS] != b[BLOCK_TOKENS : 2 * BLOCK_TOKENS]
    assert a[-10:] != b[-10:]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "a.jsonl, line 2: "),
        ("[1]", "line 2: is no object"),
        ('{"text_input": "a"}', "line 2: 'timestamp' must be milliseconds"),
        ('{"timestamp": NaN, "text_input": "a"}', "line 2: 'timestamp'"),
        ('{"timestamp": true, "text_input": "a"}', "line 2: 'timestamp'"),
        ('{"timestamp": 1}', "line 2: has neither 'text_input' nor 'input_length'"),
        ('{"timestamp": 1, "text_input": ""}', "line 2: 'text_input' must be a text"),
        ('{"timestamp": 1, "input_length": 0}', "line 2: 'input_length' must be a number"),
        ('{"timestamp": 1, "input_length": 5, "hash_ids": ["a"]}', "line 2: 'hash_ids'"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(line: str, words: str) -> None:
    content = trace({"timestamp": 0, "text_input": "a"}) + b"\n" + line.encode()
    with pytest.raises(DataError, match=words):
        read_trace(content, "a.jsonl")


def test_a_trace_without_requests_is_refused() -> None:
    with pytest.raises(DataError, match="holds no request"):
        read_trace(b"\n", "a.jsonl")
    with pytest.raises(DataError, match="not UTF-8"):
        read_trace(b"\xff", "a.jsonl")


def test_events_are_whole_wherever_the_stream_is_cut() -> None:
    content = 'data: {"a": "\u00e9"}\r\n\r\n: comment\nevent: x\ndata:{"b": 2}\n\ndata: [DONE]\n\n'
    for size in (1, 3, 1000):
        stream, found = EventStream(), []
        data = content.encode()
        for begin in range(0, len(data), size):
            found += stream.feed(data[begin : begin + size])
        assert found == [{"a": "\u00e9"}, {"b": 2}]
        assert stream.is_done


def test_what_is_no_event_stream_is_refused() -> None:
    with pytest.raises(ValueError, match="Expecting"):
        EventStream().feed(b"data: <html>\n")
    with pytest.raises(ValueError, match="a line of more than"):
        EventStream().feed(b"x" * (MAX_LINE_BYTES + 1))
