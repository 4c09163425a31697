"""The client against a server on localhost whose delays are known."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.trainyard.load_test.fake_server import FakeServer, fake_server
from trainyard.errors import InfrastructureError
from trainyard.load_test.driver import LoadDriver
from trainyard.load_test.http_target import Endpoint, HttpTarget
from trainyard.load_test.records import RequestRecord
from trainyard.load_test.workload import PlannedRequest


def measured(
    prompts: Sequence[str | tuple[int, ...]],
    *,
    endpoint: Endpoint = "completions",
    max_tokens: int = 3,
    concurrency: int = 8,
    timeout: float = 20,
    **options: Any,
) -> tuple[list[RequestRecord], FakeServer]:
    async def work() -> tuple[list[RequestRecord], FakeServer]:
        async with fake_server() as server:
            target = HttpTarget(
                server.url + "/v1/", endpoint, "m", options, seed=7, api_key="secret"
            )
            requests = [
                PlannedRequest(index=i, prompt=prompt, max_tokens=max_tokens)
                for i, prompt in enumerate(prompts)
            ]
            async with target:
                records = await LoadDriver(target, timeout).closed_loop(requests, concurrency)
            for _ in range(200):  # the other side learns of a closed connection a little later
                if not server.open:
                    break
                await asyncio.sleep(0.01)
            return records, server

    return asyncio.run(work())


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_latencies_are_the_delays_of_the_server(endpoint: Endpoint) -> None:
    (record,), server = measured(["tokens:60:30"], endpoint=endpoint)
    assert record.error is None
    assert len(record.token_times) == record.output_tokens == 3
    assert record.is_counted_by_server
    assert record.prompt_tokens == len("tokens:60:30")
    assert record.finish_reason == "length"
    # A sleep is never short; on a busy machine it may be long. The role of a chat is no token.
    assert 0.06 <= record.ttft < 5
    assert 0.03 <= record.gaps[0] < 5
    assert 0.03 <= (record.tpot or 0) < 5
    assert 0.12 <= record.e2el <= record.ended_at - record.sent_at
    (body,) = server.bodies
    assert body["seed"] == 7
    assert body["stream"] is True
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_a_body_asks_for_what_the_request_says() -> None:
    (record,), server = measured([(1, 2, 3)], max_tokens=2, temperature=0.0, ignore_eos=True)
    assert record.prompt_tokens == 3
    assert server.bodies == [
        {
            "model": "m",
            "prompt": [1, 2, 3],
            "seed": 7,
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            "ignore_eos": True,
        }
    ]


def test_pieces_are_counted_where_the_server_counts_no_tokens() -> None:
    (record,), _ = measured(["uncounted:0:0"], max_tokens=4)
    assert record.output_tokens == 4
    assert not record.is_counted_by_server
    assert record.prompt_tokens is None


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("busy:0:0", "HTTP 429: too many requests"),
        ("whole:0:0", "answered with application/json, not with a stream"),
        ("cut:0:0", "Server disconnected|payload is not completed|Response payload|broke off"),
        ("short:0:0", "the stream broke off before its end"),
        ("fault:0:0", "error in the stream: out of blocks"),
        ("mute:0:0", "the answer has no text"),
        ("tokens:60000:0", "no end within 0.3 seconds"),
    ],
)
def test_a_failed_request_says_why_and_the_others_go_on(prompt: str, words: str) -> None:
    records, server = measured([prompt, "tokens:0:0"], concurrency=1, timeout=0.3)
    bad, good = records
    assert bad.error is not None
    assert any(part in bad.error for part in words.split("|")), bad.error
    assert good.error is None
    assert server.open == 0


def test_a_closed_loop_opens_as_many_connections_as_it_may() -> None:
    records, server = measured(["tokens:20:0"] * 12, concurrency=4)
    assert all(record.is_ok for record in records)
    assert server.most_open == 4


def test_a_server_that_is_not_there_is_an_error_of_every_request() -> None:
    async def work() -> RequestRecord:
        target = HttpTarget("http://127.0.0.1:9", "completions", "m", {}, seed=None)
        async with target:
            with pytest.raises(
                InfrastructureError,
                match=r"--url: http://127.*/v1/models does not answer: .*Connection refused",
            ):
                await target.served_model()
            requests = [PlannedRequest(index=0, prompt="a", max_tokens=1)]
            (record,) = await LoadDriver(target, 5).closed_loop(requests, 1)
            return record

    assert "Cannot connect to host" in (asyncio.run(work()).error or "")


def test_the_model_is_the_first_that_the_server_lists() -> None:
    async def work() -> str:
        async with (
            fake_server() as server,
            HttpTarget(server.url, "completions", "", {}, seed=None) as target,
        ):
            return await target.served_model()

    assert asyncio.run(work()) == "tiny"
