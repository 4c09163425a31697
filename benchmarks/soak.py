"""A server under load for a long time: no error, no leaked block, no growing memory.

    python -m benchmarks.soak                                30 minutes at the rate of a sweep
    python -m benchmarks.soak --minutes 1 --rate 2

`stages.serve` gets requests at random times (Poisson), at the highest rate that meets --goodput by
`stages.benchmark --sweep`: through OpenAI's interface, streamed or not, and Megatron-LM's. One in
five is left: its client closes the connection after a random time, or after a few events of its
stream. Then nothing may run, no block of the cache may be held, and the resident memory of the
server may grow by 2 % from the first tenth of the time after the warm-up to the last.

The warm-up is as many requests at once as the engine takes, so that every block of the cache has
been written to and has its memory, and then the first tenth of the time. An answer is an error
unless it has status 200 and all tokens that were asked for; 429, by which a full server refuses, is
counted by itself."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from benchmarks.corpus import report
from benchmarks.served import model_folder, pinned, run, served
from trainyard.inference.dynamic.config import DynamicConfig
from trainyard.load_test.event_stream import EventStream

log = logging.getLogger("soak")

FLAT = 0.02
"""Most growth of the resident memory, in parts of it."""
LEFT = 0.2
"""Part of the requests whose client goes away."""
GOODPUT = ("ttft:2000", "tpot:250")
VOCAB = 256
"""Prompts are of tokens below it."""
PROMPT_TOKENS, NEW_TOKENS = (1, 64), (1, 64)
SAMPLE_SECONDS = 5.0
DRAIN_SECONDS = 120.0
TENTHS = 10
SAY_SECONDS = 60.0
HELD = ("trainyard_cache_blocks_used", "trainyard_requests_running", "trainyard_requests_open")
"""Series of /metrics that are 0 when nothing runs."""


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
        self.found = Found()

    async def burst(self, count: int) -> None:
        """Send so many requests at once, and wait for the answers."""
        new = self._new_tokens[1]
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._plain(new, None))

    async def run(self, rate: float, seconds: float) -> None:
        """Send at a rate for so long, and wait for the answers."""
        loop = asyncio.get_running_loop()
        end = at = loop.time()
        end += seconds
        async with asyncio.TaskGroup() as group:
            while (at := at + self._draw.expovariate(rate)) < end:
                await asyncio.sleep(max(at - loop.time(), 0.0))
                group.create_task(self._one())

    async def _one(self) -> None:
        draw = self._draw
        kind = draw.choice(("stream", "plain", "megatron"))
        is_left = draw.random() < LEFT
        new = draw.randint(*self._new_tokens)
        # Both ways of leaving: at a time, whatever the server does then, or within a stream.
        after_events = draw.randint(1, 8) if is_left and draw.random() < 0.5 else None
        patience = draw.expovariate(1.0) if is_left and after_events is None else None
        send = {"stream": self._stream, "plain": self._plain, "megatron": self._megatron}[kind]
        try:
            async with asyncio.timeout(patience):
                end = await send(new, after_events)
        except TimeoutError:
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
        events, counted = EventStream(), 0
        async with self._session.post(f"{self._url}/v1/completions", json=fields) as response:
            if response.status == 429:
                return "refused"
            await _check_status(response)
            async for piece in response.content.iter_any():
                for document in events.feed(piece):
                    if "error" in document:
                        raise WrongAnswerError(str(document["error"]["message"]))
                    counted += 1
                    _check_usage(document, fields)
                if after_events is not None and counted >= after_events:
                    return "left"
        if not events.is_done:
            raise WrongAnswerError("the stream broke off")
        return "done"

    async def _plain(self, new: int, after_events: int | None) -> str:
        fields = self._fields(new)
        async with self._session.post(f"{self._url}/v1/completions", json=fields) as response:
            if response.status == 429:
                return "refused"
            await _check_status(response)
            _check_usage(await response.json(), fields)
        return "done"

    async def _megatron(self, new: int, after_events: int | None) -> str:
        text = "a" * self._draw.randint(*self._prompt_tokens)
        fields = {"prompts": [text] * self._draw.randint(1, 3), "tokens_to_generate": new}
        async with self._session.put(f"{self._url}/api", json=fields) as response:
            if response.status == 429:
                return "refused"
            await _check_status(response)
            if len((await response.json())["text"]) != len(fields["prompts"]):
                raise WrongAnswerError("an answer without a text for each prompt")
        return "done"


async def _check_status(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise WrongAnswerError(f"HTTP {response.status}: {(await response.text())[:200]}")


def _check_usage(document: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """All tokens that were asked for, where a document says how many there are."""
    if (usage := document.get("usage")) is not None:
        asked = fields["max_tokens"] * fields.get("n", 1)
        if usage["completion_tokens"] != asked:
            raise WrongAnswerError("an answer with another number of tokens than asked for")


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


# --- the server's memory ----------------------------------------------------------------------


def resident_bytes(process: int) -> int:
    """Memory of a process that is in RAM."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def watch(process: int, found: Found, samples: list[int]) -> None:
    """Append the memory every SAMPLE_SECONDS, and say how far it is, until cancelled."""
    said = began = time.monotonic()
    while True:
        samples.append(resident_bytes(process))
        if time.monotonic() - said >= SAY_SECONDS:
            said = time.monotonic()
            log.info(
                "%4.0f s: %d requests, %d errors, %.1f MiB",
                *(said - began, found.total, found.errors.total(), samples[-1] / 2**20),
            )
        await asyncio.sleep(SAMPLE_SECONDS)


def growth(samples: list[int]) -> tuple[float, float, float]:
    """Medians of the second tenth of the samples and of the last, and their difference in parts of
    the former. The first tenth is the warm-up."""
    size = max(len(samples) // TENTHS, 1)
    before, after = statistics.median(samples[size : 2 * size]), statistics.median(samples[-size:])
    return before, after, after / before - 1


# --- the program ------------------------------------------------------------------------------


def swept_rate(url: str, load: str) -> float:
    """Requests a second of a sweep; RuntimeError if none meets the limits."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        words = ["--url", url, "--load", load, "--output-dir", str(out), "--ignore-eod", "--sweep"]
        words += ["--input-lengths", "uniform:{}:{}".format(*PROMPT_TOKENS)]
        words += ["--output-lengths", "uniform:{}:{}".format(*NEW_TOKENS)]
        words += ["--num-requests", "60", "--sweep-max-probes", "8", "--goodput", *GOODPUT]
        run([sys.executable, "-m", "stages.benchmark", *words])
        rate: float | None = json.loads((out / "summary.json").read_text())["highest_rate"]
    if rate is None:
        raise RuntimeError(f"no rate meets {' '.join(GOODPUT)} on this machine")
    return rate


async def soak(url: str, process: int, rate: float, seconds: float) -> bool:
    """Whether the server stood it; prints a row for each law."""
    samples: list[int] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        traffic = Traffic(url, session, seed=1)
        await traffic.burst(DynamicConfig().inference_dynamic_batching_max_requests)
        watching = asyncio.create_task(watch(process, traffic.found, samples))
        await traffic.run(rate, seconds)
        watching.cancel()
        in_use = await held_at_the_end(session, url)
    found = traffic.found
    before, after, change = growth(samples)
    minutes = f"{seconds / 60:g} minutes"
    ends = ", ".join(f"{n} {end}" for end, n in sorted(found.ends.items()))
    errors = "".join(f"; {n} x {error}" for error, n in found.errors.most_common(5))
    total = f"{found.errors.total()} of {found.total} requests ({ends}){errors}"
    used = ", ".join(f"{name} {count:g}" for name, count in in_use.items())
    memory = f"{before / 2**20:.1f} and {after / 2**20:.1f} MiB: {100 * change:+.2f} %"
    laws = (
        (f"{minutes} at {rate:.3g} requests/s: errors", total, "0", not found.errors),
        ("in use at the end", used, "0", not any(in_use.values())),
        ("resident memory, second and last tenth", memory, f"{100 * FLAT:g} %", change <= FLAT),
    )
    for law in laws:
        report(*law)
    return all(ok for *_, ok in laws)


def main() -> None:
    """Read the command line and run; exit status 1 if a law does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--load", help="checkpoint; unset: random weights")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, help="requests a second; unset: that of a sweep")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with model_folder(given.load) as load:
        cores = os.sched_getaffinity(0)
        command = pinned(cores, "stages.serve", "--load", load, "--device", "cpu")
        with served(command) as (url, process):
            rate = given.rate or swept_rate(url, load)
            log.info("%.3g requests/s for %g minutes", rate, given.minutes)
            stood = asyncio.run(soak(url, process, rate, 60 * given.minutes))
    sys.exit(not stood)


if __name__ == "__main__":
    main()
