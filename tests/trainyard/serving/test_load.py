"""The client of load tests against the real server, beside the server's own counts."""

from __future__ import annotations

import asyncio

import pytest

from tests.trainyard.serving.running import NAME, Running
from trainyard.load_test.driver import LoadDriver
from trainyard.load_test.http_target import Endpoint, HttpTarget
from trainyard.load_test.metrics import summarize
from trainyard.load_test.records import RequestRecord
from trainyard.load_test.workload import PlannedRequest


def measured(
    url: str, endpoint: Endpoint, requests: list[PlannedRequest], timeout: float = 60
) -> list[RequestRecord]:
    async def work() -> list[RequestRecord]:
        options = {"temperature": 0.0, "ignore_eos": True}
        async with HttpTarget(url, endpoint, "", options, seed=None) as target:
            target.use_model(await target.served_model())
            assert target.model == NAME
            return await LoadDriver(target, timeout).closed_loop(requests, 3)

    return asyncio.run(work())


@pytest.mark.slow
def test_tokens_are_those_that_the_engine_counts(server: Running) -> None:
    before = server.served.service.stats
    requests = [
        PlannedRequest(index=i, prompt=tuple(range(65, 70 + i)), max_tokens=3 + i) for i in range(6)
    ]
    records = measured(server.url, "completions", requests)
    assert [record.error for record in records] == [None] * 6
    assert [record.output_tokens for record in records] == [3, 4, 5, 6, 7, 8]
    assert [record.prompt_tokens for record in records] == [5, 6, 7, 8, 9, 10]
    assert all(record.finish_reason == "length" for record in records)
    found, after = summarize(records), server.served.service.stats
    assert found["output_tokens"] == after.generated_tokens - before.generated_tokens
    assert found["max_concurrency"] <= 3


@pytest.mark.slow
def test_a_request_that_the_server_refuses_is_counted(server: Running) -> None:
    requests = [PlannedRequest(index=i, prompt=(65,), max_tokens=3 + 100 * i) for i in range(2)]
    good, bad = measured(server.url, "completions", requests)
    assert good.is_ok
    assert bad.error is not None
    assert bad.error.startswith("HTTP 400: ")


def test_a_request_that_is_too_slow_is_cancelled_at_the_server(
    server: Running,
) -> None:
    requests = [PlannedRequest(index=0, prompt=(65,), max_tokens=60)]
    (record,) = measured(server.url, "completions", requests, timeout=0.001)
    assert record.error == "no end within 0.001 seconds"
