"""Closed and open loops in virtual time: every latency is exact."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainyard.load_test.virtual_time import run_virtually
from trainyard.load_test.driver import NO_TEXT, Answer, LoadDriver, RequestError
from trainyard.load_test.metrics import summarize
from trainyard.load_test.workload import PlannedRequest


class Server:
    """The first token of request i after first[i] seconds, the others every `gap`."""

    def __init__(self, first: Sequence[float], gap: float = 0.5) -> None:
        self.first, self.gap = first, gap
        self.open = self.most_open = 0
        self.order: list[int] = []

    async def send(self, request: PlannedRequest, answer: Answer) -> None:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        self.order.append(request.index)
        loop = asyncio.get_running_loop()
        try:
            for number in range(request.max_tokens):
                await asyncio.sleep(self.gap if number else self.first[request.index])
                answer.on_text(loop.time(), 1)
            answer.on_finish("length")
        finally:
            self.open -= 1


def planned(count: int, max_tokens: int = 3) -> list[PlannedRequest]:
    return [PlannedRequest(index=i, prompt=(1, 2), max_tokens=max_tokens) for i in range(count)]


def test_a_closed_loop_sends_when_a_request_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server([1.0, 3.0, 2.0])
    work = LoadDriver(server, 100).closed_loop(planned(3), 2)
    records = run_virtually(monkeypatch, work)
    # Tokens of 0 at 1, 1.5, 2; of 1 at 3, 3.5, 4; 2 is sent at 2, as 0 has ended: at 4, 4.5, 5.
    assert [record.sent_at for record in records] == [0, 0, 2]
    assert [record.token_times for record in records] == [[1, 1.5, 2], [3, 3.5, 4], [4, 4.5, 5]]
    assert [record.ttft for record in records] == [1, 3, 2]
    assert [record.e2el for record in records] == [2, 4, 3]
    assert [record.tpot for record in records] == [0.5] * 3
    found = summarize(records)
    assert found["duration_seconds"] == 5
    assert found["output_tokens_per_second"] == 9 / 5
    assert found["prompt_tokens"] == 6
    assert found["total_tokens_per_second"] == 15 / 5
    assert found["max_concurrency"] == 2


@settings(max_examples=10, deadline=None)
@given(
    first=st.lists(st.floats(0, 10), min_size=1, max_size=12),
    concurrency=st.integers(1, 5),
)
def test_a_closed_loop_never_exceeds_its_concurrency(first: list[float], concurrency: int) -> None:
    server = Server(first)
    with pytest.MonkeyPatch.context() as patch:
        work = LoadDriver(server, 1e4).closed_loop(planned(len(first), 2), concurrency)
        records = run_virtually(patch, work)
    assert server.most_open == min(concurrency, len(first))
    assert summarize(records)["max_concurrency"] <= concurrency
    assert [record.index for record in records] == list(range(len(first))) == server.order


def test_an_open_loop_sends_at_its_times_whatever_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, times = Server([9.0] * 4), [0.0, 0.25, 0.25, 4.0]
    records = run_virtually(monkeypatch, LoadDriver(server, 100).open_loop(planned(4), times))
    assert [record.sent_at for record in records] == times
    assert [record.send_lag for record in records] == [0] * 4
    assert server.most_open == 4
    assert [record.e2el for record in records] == [10] * 4


def test_every_request_has_a_record_however_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Faulty(Server):
        async def send(self, request: PlannedRequest, answer: Answer) -> None:
            if request.index == 1:
                raise RequestError("HTTP 429")
            if request.index == 2:
                await asyncio.sleep(1)  # and no text
                return
            await super().send(request, answer)

    server = Faulty([1.0, 0, 0, 60.0])
    records = run_virtually(monkeypatch, LoadDriver(server, 5).closed_loop(planned(4), 1))
    assert [r.error for r in records] == [None, "HTTP 429", NO_TEXT, "no end within 5 seconds"]
    assert server.open == 0  # what was too slow is no longer under way
    found = summarize(records)
    assert (found["num_requests"], found["num_completed"], found["num_failed"]) == (4, 1, 3)
    assert sum(found["errors"].values()) == 3
    assert found["output_tokens"] == 3
    assert found["ttft"]["max"] == 1


def test_a_defect_of_a_target_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Server):
        async def send(self, request: PlannedRequest, answer: Answer) -> None:
            raise KeyError("a defect")

    with pytest.raises(ExceptionGroup) as found:
        run_virtually(monkeypatch, LoadDriver(Broken([]), 5).closed_loop(planned(2), 1))
    assert found.group_contains(KeyError)
