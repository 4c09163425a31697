"""Requests of an event loop on an engine in a thread: order, cancellation, limits, failure."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Coroutine
from typing import Any

import pytest

from tests.trainyard.serving.running import service_of
from trainyard.errors import ConfigError
from trainyard.inference.engine import EngineStats, Update
from trainyard.inference.request import Completion, Request
from trainyard.serving.engine_side import engine_in_thread
from trainyard.serving.service import EngineFailedError, EngineService, QueueFullError, Stream
from trainyard.tokenizers.bytelevel import ByteLevelTokenizer
from trainyard.tokenizers.config import TokenizerConfig

TOKENIZER = ByteLevelTokenizer(TokenizerConfig(tokenizer_type="ByteLevelTokenizer"))
ENDLESS = 10**9
"""Tokens of a request that only a cancellation ends, however late it comes."""


class Counting:
    """An engine whose outputs count from the first token of their prompt."""

    max_tokens = 100

    def __init__(self, fails_at: int = 0) -> None:
        """fails_at: the first token of a prompt that breaks it; 0: none."""
        self._fails_at = fails_at
        self.running: dict[int, Completion] = {}
        self.cancelled: list[int] = []
        self._next = 0

    def add(self, request: Request, *, priority: int = 0) -> int:
        if len(request.prompt) > self.max_tokens:
            raise ConfigError("--prompts is too long")
        self._next += 1
        self.running[self._next] = Completion(request)
        return self._next

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)
        self.running.pop(number, None)

    def step(self) -> list[Update]:
        updates = []
        for number, completion in list(self.running.items()):
            first = completion.request.prompt[0]
            if first == self._fails_at:
                raise RuntimeError("the device is gone")
            completion.append(first + len(completion.tokens))
            updates.append(Update(number=number, num_new=1, completion=completion))
            if completion.is_done:
                del self.running[number]
        return updates

    def has_work(self) -> bool:
        return bool(self.running)

    def stats(self) -> EngineStats:
        zeros = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
        return EngineStats(**(zeros | {"num_running": len(self.running)}))


def _refuse() -> None:
    raise ConfigError("no room")


CALLS = {"give": lambda value: value, "refuse": _refuse}


def request(first: int, count: int = 3) -> Request:
    return Request(prompt=[first], max_tokens=count)


def run(engine: Counting, work: Any, max_queued: int = 8, calls: Any = CALLS) -> Any:
    """What `work(service)` returns."""

    async def all_of_it(connection: socket.socket) -> Any:
        service = service_of(engine, connection, max_queued)
        await service.start()
        try:
            return await asyncio.wait_for(work(service), 10)
        finally:
            await service.stop()

    with engine_in_thread(engine, TOKENIZER, calls) as connection:
        return asyncio.run(all_of_it(connection))


async def tokens_of(stream: Stream, count: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(count)]
    async for index, piece in stream:
        found[index] += piece.tokens
    return found


def test_each_request_gets_its_own_tokens() -> None:
    async def work(service: EngineService) -> list[list[list[int]]]:
        async def one(first: int) -> list[list[int]]:
            with service.open([request(first), request(first + 50)]) as stream:
                return await tokens_of(stream, 2)

        return await asyncio.gather(*map(one, (10, 20, 30)))

    found = run(Counting(), work)
    assert found == [[[f, f + 1, f + 2], [f + 50, f + 51, f + 52]] for f in (10, 20, 30)]


def test_what_is_left_is_cancelled_and_nothing_stays_open() -> None:
    engine = Counting()

    async def work(service: EngineService) -> int:
        with service.open([request(1, ENDLESS)]) as stream:
            await anext(stream)
        await service.call("give", {"value": 0})  # behind the cancellation
        return service.num_open

    assert run(engine, work) == 0
    assert engine.cancelled == [1]
    assert not engine.has_work()


def test_figures_know_that_a_request_was_cancelled_though_no_other_one_runs() -> None:
    async def work(service: EngineService) -> tuple[int, int]:
        with service.open([request(1, ENDLESS)]) as stream:
            await anext(stream)
            during = service.stats.num_running
        while service.stats.num_running:  # no other step has an update
            await asyncio.sleep(0.001)
        return during, service.stats.num_running

    assert run(Counting(), work) == (1, 0)


def test_a_reader_that_waits_for_ends_is_woken_once_for_each_request() -> None:
    async def work(service: EngineService) -> list[tuple[int, list[int]]]:
        with service.open([request(10, 30)], wakes_at_ends=True) as stream:
            found = [(index, piece.tokens) async for index, piece in stream]
            assert stream.began_at.keys() == {0}
            return found

    assert run(Counting(), work) == [(0, list(range(10, 40)))]


def test_a_full_queue_takes_all_of_a_request_or_nothing() -> None:
    async def work(service: EngineService) -> int:
        with pytest.raises(QueueFullError, match="at most 2"), service.open([request(1)] * 3):
            pass
        with service.open([request(1)] * 2) as stream:
            return len(await tokens_of(stream, 2))

    assert run(Counting(), work, max_queued=2) == 2


def test_a_request_that_the_engine_refuses_hurts_no_other_one() -> None:
    async def work(service: EngineService) -> list[list[int]]:
        long = Request(prompt=[1] * 101, max_tokens=1)
        with service.open([request(7)]) as good:
            with pytest.raises(ConfigError, match="too long"), service.open([long]) as bad:
                await anext(bad)
            return await tokens_of(good, 1)

    assert run(Counting(), work) == [[7, 8, 9]]


def refused(work: Awaitable[Any]) -> Coroutine[Any, Any, None]:
    async def check() -> None:
        with pytest.raises(EngineFailedError, match="the device is gone"):
            await work

    return check()


def test_an_engine_that_fails_fails_every_open_request_and_each_new_one() -> None:
    ended = []

    async def work(service: EngineService) -> None:
        service.on_failure = lambda: ended.append(True)

        async def one(first: int) -> None:
            with service.open([request(first, 1000)]) as stream:
                await tokens_of(stream, 1)

        await asyncio.gather(refused(one(1)), refused(one(66)))
        await refused(one(1))
        assert not service.is_alive

    run(Counting(fails_at=66), work)
    assert ended == [True]


def test_calls_between_steps_get_their_result_or_their_error() -> None:
    async def work(service: EngineService) -> Any:
        with pytest.raises(ConfigError, match="no room"):
            await service.call("refuse", {})
        return await service.call("give", {"value": [1, "a", None, 0.1]})

    assert run(Counting(), work) == [1, "a", None, 0.1]


def test_calls_keep_a_server_busy_and_end_with_the_engine() -> None:
    gate = threading.Event()
    engine = Counting(fails_at=66)

    async def work(service: EngineService) -> None:
        calls = [asyncio.ensure_future(service.call("hold", {})) for _ in range(2)]
        await asyncio.sleep(0)
        assert not service.is_idle
        with service.open([request(66)]):
            gate.set()
            for call in calls:
                await refused(call)
        assert service.is_idle

    def hold() -> None:
        assert gate.wait(10)

    run(engine, work, calls={"hold": hold})


def test_an_engine_that_goes_without_a_word_is_noticed() -> None:
    ours, theirs = socket.socketpair()

    async def work() -> None:
        service = service_of(Counting(), ours, 8)
        service.why_gone = lambda: "it was killed"
        await service.start()
        with service.open([request(1)]) as stream:
            theirs.close()
            with pytest.raises(EngineFailedError, match="the engine has ended: it was killed"):
                await anext(stream)
        assert not service.is_alive
        await service.stop()

    asyncio.run(work())


def test_a_slow_reader_gets_what_came_meanwhile_at_once() -> None:
    async def work(service: EngineService) -> list[tuple[int, list[int], str | None]]:
        with service.open([request(10, 40), request(60, 30)]) as stream:
            while stream.num_open:
                await asyncio.sleep(0.001)
            return [(i, piece.tokens, piece.finish_reason) async for i, piece in stream]

    assert run(Counting(), work) == [
        (0, [*range(10, 50)], "length"),
        (1, [*range(60, 90)], "length"),
    ]
