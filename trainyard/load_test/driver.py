"""Sends requests to a target by a closed or an open loop, and records what happens.

Knows nothing of HTTP or engines: a target does, behind the protocol of this file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from trainyard.load_test.records import RequestRecord
from trainyard.load_test.workload import PlannedRequest

Clock = Callable[[], float]
"""Seconds of one clock, for targets and drivers alike."""

CLOCK: Clock = time.perf_counter

NO_TEXT = "the answer has no text"


class RequestError(Exception):
    """A request was refused, cut off or too slow. The message is one line, the same for errors of
    one kind, since errors are counted by it."""


class Answer(Protocol):
    """What a target reports while a request runs; times by `CLOCK`."""

    def on_text(self, at: float, num_tokens: int) -> None:
        """A piece of the output with text. num_tokens: in it, if the target knows, else 1."""

    def on_usage(self, prompt_tokens: int | None, output_tokens: int) -> None:
        """The target's own count of tokens."""

    def on_finish(self, reason: str) -> None:
        """Why the output ended."""


class Target(Protocol):
    """What is measured."""

    async def send(self, request: PlannedRequest, answer: Answer) -> None:
        """Run a request to its end. Raises RequestError if it fails; cancelling it must end the
        request at the other side, too."""


class _Recorder:
    """Fills a record, with times from the start of the measurement."""

    def __init__(self, record: RequestRecord, start: float) -> None:
        self.record, self._start = record, start

    def on_text(self, at: float, num_tokens: int) -> None:
        self.record.token_times.append(at - self._start)
        if not self.record.is_counted_by_server:
            self.record.output_tokens += num_tokens

    def on_usage(self, prompt_tokens: int | None, output_tokens: int) -> None:
        record = self.record
        record.output_tokens, record.is_counted_by_server = output_tokens, True
        if prompt_tokens is not None:
            record.prompt_tokens = prompt_tokens

    def on_finish(self, reason: str) -> None:
        self.record.finish_reason = reason


class LoadDriver:
    """One measurement: its records are in the order of the requests."""

    def __init__(
        self,
        target: Target,
        timeout_seconds: float,
        on_end: Callable[[int], object] = lambda count: None,
    ) -> None:
        """timeout_seconds: of one request. on_end: called with 1 as each request ends."""
        self._target, self._timeout, self._on_end = target, timeout_seconds, on_end
        self._start = 0.0

    async def closed_loop(
        self, requests: Sequence[PlannedRequest], concurrency: int
    ) -> list[RequestRecord]:
        """Keep `concurrency` requests under way: the next one is sent when one has ended."""
        self._start = CLOCK()
        records: list[RequestRecord] = []
        waiting = iter(requests)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(requests))):
                group.create_task(self._user(waiting, records))
        return sorted(records, key=lambda record: record.index)

    async def _user(self, waiting: Iterator[PlannedRequest], records: list[RequestRecord]) -> None:
        for request in waiting:
            records.append(await self._run(request, None))

    async def open_loop(
        self, requests: Sequence[PlannedRequest], times: Sequence[float]
    ) -> list[RequestRecord]:
        """Send each request at its time, however many are under way. times: seconds, ascending."""
        self._start = CLOCK()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for request, at in zip(requests, times, strict=True):
                pause = self._start + at - CLOCK()
                # Also without a pause, so that what has arrived is read between two requests.
                await asyncio.sleep(max(pause, 0.0))
                tasks.append(group.create_task(self._run(request, at)))
        return [task.result() for task in tasks]

    async def _run(self, request: PlannedRequest, at: float | None) -> RequestRecord:
        prompt = request.prompt
        record = RequestRecord(
            index=request.index,
            scheduled_at=at,
            prompt_tokens=len(prompt) if isinstance(prompt, tuple) else None,
            sent_at=CLOCK() - self._start,
        )
        try:
            async with asyncio.timeout(self._timeout):
                await self._target.send(request, _Recorder(record, self._start))
        except RequestError as error:
            record.error = str(error)
        except TimeoutError:
            record.error = f"no end within {self._timeout:g} seconds"
        else:
            record.error = None if record.token_times else NO_TEXT
        record.ended_at = CLOCK() - self._start
        self._on_end(1)
        return record
