"""Random requests to a server by clients of which some go away, and what became of them.

Requests come at random times (Poisson): through OpenAI's interface, streamed or not, and
Megatron-LM's. One in five has a client that means to go away: from a stream after a few events or a
random time, else after a random time. It leaves unless its answer is whole by then.

An answer is an error unless it has status 200 and all tokens that were asked for, and comes in
time; 429, by which a full server refuses, is counted by itself."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from trainyard.load_test.event_stream import EventStream

LEFT = 0.2
"""Part of the requests whose client means to go away."""
ANSWER_SECONDS = 300.0
"""In which a request must be answered."""
VOCAB = 256
"""Prompts are of tokens below it."""
LETTER, STOP = "a", VOCAB - 1
"""Prompts of Megatron-LM's interface are of the one, and its texts end at the other, a token."""
PROMPT_TOKENS, NEW_TOKENS = (1, 64), (1, 64)
DRAIN_SECONDS = 120.0
HELD = ("trainyard_cache_blocks_used", "trainyard_requests_running", "trainyard_requests_open")
"""Series of /metrics that are 0 when nothing runs."""
WRONG_COUNT = "an answer with another number of tokens than asked for"


class WrongAnswerError(Exception):
    """An answer is not what was asked for. The message is the same for errors of one kind."""


@dataclass
class Found:
    """What became of the requests."""

    ends: Counter[str] = field(default_factory=Counter)
    """Requests by their kind and end: "stream done", "plain left"..."""
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Requests that have ended."""
        return self.ends.total() + self.errors.total()


class Traffic:
    """Random requests to a server."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        seed: int,
        *,
        prompt_tokens: tuple[int, int] = PROMPT_TOKENS,
        new_tokens: tuple[int, int] = NEW_TOKENS,
    ) -> None:
        """prompt_tokens, new_tokens: fewest and most of a text."""
        self._url, self._session = url, session
        self._prompt_tokens, self._new_tokens = prompt_tokens, new_tokens
        self._draw = random.Random(seed)
        self._sizes: list[int] = []
        """Tokens of `LETTER` once, twice..."""
        self.found = Found()

    async def burst(self, count: int) -> None:
        """Send so many requests at once, and wait for the answers."""
        new = self._new_tokens[1]
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._plain(new))

    async def run(self, rate: float, seconds: float) -> None:
        """Send at a rate for so long, and wait for the answers."""
        self._sizes = await self._prompt_sizes()
        loop = asyncio.get_running_loop()
        end = at = loop.time()
        end += seconds
        async with asyncio.TaskGroup() as group:
            while (at := at + self._draw.expovariate(rate)) < end:
                await asyncio.sleep(max(at - loop.time(), 0.0))
                group.create_task(self._one())
            await asyncio.sleep(max(end - loop.time(), 0.0))

    async def _prompt_sizes(self) -> list[int]:
        """How many tokens the prompts of Megatron-LM's interface have: an answer begins with them,
        and does not say where they end."""
        texts = [LETTER * count for count in range(1, self._prompt_tokens[1] + 1)]
        fields = {"prompts": texts, "tokens_to_generate": 0, "logprobs": True}
        async with self._session.put(f"{self._url}/api", json=fields) as response:
            await _check_status(response)
            return [len(row) for row in (await response.json())["tokens"]]

    async def _one(self) -> None:
        draw = self._draw
        kind = draw.choice(("stream", "plain", "megatron"))
        is_left = draw.random() < LEFT
        new = draw.randint(*self._new_tokens)
        after_events = None
        if is_left and kind == "stream" and draw.random() < 0.5:
            after_events = draw.randint(1, 8)
        patience = draw.expovariate(1.0) if is_left and after_events is None else None
        try:
            async with asyncio.timeout(patience) as leaving:
                if kind == "stream":
                    end = await self._stream(new, after_events)
                else:
                    end = await (self._plain(new) if kind == "plain" else self._megatron(new))
        except TimeoutError:
            if not leaving.expired():
                self.found.errors[f"{kind}: no answer in time"] += 1
                return
            end = "left"
        except (WrongAnswerError, aiohttp.ClientError, ValueError, LookupError) as error:
            self.found.errors[f"{kind}: {type(error).__name__}: {error}"] += 1
            return
        self.found.ends[f"{kind} {end}"] += 1

    def _prompt(self) -> list[int]:
        length = self._draw.randint(*self._prompt_tokens)
        return [self._draw.randrange(1, VOCAB) for _ in range(length)]

    def _fields(self, new: int) -> dict[str, Any]:
        draw = self._draw
        fields = {"prompt": self._prompt(), "max_tokens": new, "ignore_eos": True}
        if draw.random() < 0.5:
            fields |= {"temperature": 0.8, "top_p": 0.9, "seed": draw.randrange(1000)}
        if draw.random() < 0.2:
            fields |= {"n": 2}
        if draw.random() < 0.2:
            fields |= {"logprobs": 3}
        return fields

    async def _stream(self, new: int, after_events: int | None) -> str:
        """Read a stream, or so many events of it."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        fields = self._fields(new) | options
        events, counted, usage = EventStream(), 0, None
        async with self._session.post(f"{self._url}/v1/completions", json=fields) as response:
            if response.status == 429:
                return "refused"
            await _check_status(response)
            async for piece in response.content.iter_any():
                for document in events.feed(piece):
                    if "error" in document:
                        raise WrongAnswerError(str(document["error"]["message"]))
                    counted += 1
                    usage = document.get("usage") or usage
                if after_events is not None and counted >= after_events:
                    return "left"
        if not events.is_done:
            raise WrongAnswerError("the stream broke off")
        _check_usage(usage, fields)
        return "done"

    async def _plain(self, new: int) -> str:
        fields = self._fields(new)
        async with self._session.post(f"{self._url}/v1/completions", json=fields) as response:
            if response.status == 429:
                return "refused"
            await _check_status(response)
            _check_usage((await response.json()).get("usage"), fields)
        return "done"

    async def _megatron(self, new: int) -> str:
        count, size = self._draw.randint(1, 3), self._draw.randint(*self._prompt_tokens)
        fields = {"prompts": [LETTER * size] * count, "tokens_to_generate": new, "stop_token": STOP}
        async with self._session.put(f"{self._url}/api", json=fields) as response:
            if response.status == 429:
                return "refused"
            await _check_status(response)
            rows = (await response.json())["tokens"]
        if len(rows) != count:
            raise WrongAnswerError("an answer without a text for each prompt")
        for row in rows:
            made = len(row) - self._sizes[size - 1]
            if made != new and not (0 < made < new and row[-1] == STOP):
                raise WrongAnswerError(WRONG_COUNT)
        return "done"


async def _check_status(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise WrongAnswerError(f"HTTP {response.status}: {(await response.text())[:200]}")


def _check_usage(usage: Mapping[str, Any] | None, fields: Mapping[str, Any]) -> None:
    """All tokens that were asked for."""
    if usage is None:
        raise WrongAnswerError("an answer that does not say how many tokens it has")
    if usage["completion_tokens"] != fields["max_tokens"] * fields.get("n", 1):
        raise WrongAnswerError(WRONG_COUNT)


async def held(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """What /metrics says is in use."""
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    values = dict(line.split() for line in lines if not line.startswith("#") and "{" not in line)
    return {name: float(values[name]) for name in HELD}


async def held_at_the_end(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The same, once clients that left have been noticed, or after DRAIN_SECONDS."""
    until = time.monotonic() + DRAIN_SECONDS
    while any((found := await held(session, url)).values()) and time.monotonic() < until:
        await asyncio.sleep(0.2)
    return found
