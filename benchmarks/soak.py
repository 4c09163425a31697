"""A server under load for a long time: no error, no leaked block, no growing memory.

    python -m benchmarks.soak                                30 minutes at the rate of a sweep
    python -m benchmarks.soak --minutes 1 --rate 2

`stages.serve` gets the requests of `soak_traffic`, of whose clients up to one in five goes away, at
the highest rate that meets --goodput by `stages.benchmark --sweep`. All others must be answered in
full. Then nothing may run, no block of the cache may be held, and the resident memory of the
server, its engine's process included, may grow by 2 % from the first tenth of the time after the
warm-up to the last.

The warm-up is as many requests at once as the engine takes, so that every block of the cache has
been written to and has its memory, and then the first tenth of the time."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp

from benchmarks.corpus import report
from benchmarks.resident import LEAST_SAMPLES, children, growth, resident_bytes
from benchmarks.served import pinned, run, served
from benchmarks.served_model import model_folder
from benchmarks.soak_traffic import (
    ANSWER_SECONDS,
    NEW_TOKENS,
    PROMPT_TOKENS,
    Found,
    Traffic,
    held_at_the_end,
)
from trainyard.inference.dynamic.config import DynamicConfig

log = logging.getLogger("soak")

FLAT = 0.02
"""Most growth of the resident memory, in parts of it."""
GOODPUT = ("ttft:2000", "tpot:250")
SAMPLE_SECONDS = 5.0
SAY_SECONDS = 60.0


async def watch(process: int, found: Found, samples: list[int]) -> None:
    """Append the memory every SAMPLE_SECONDS, and say how far it is, until cancelled."""
    said = began = time.monotonic()
    while True:
        samples.append(sum(map(resident_bytes, (process, *children(process)))))
        if time.monotonic() - said >= SAY_SECONDS:
            said = time.monotonic()
            log.info(
                "%4.0f s: %d requests, %d errors, %.1f MiB",
                *(said - began, found.total, found.errors.total(), samples[-1] / 2**20),
            )
        await asyncio.sleep(SAMPLE_SECONDS)


def swept_rate(url: str, load: str) -> float:
    """Requests a second of a sweep; RuntimeError if none meets the limits."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        words = ["--url", url, "--load", load, "--output-dir", str(out), "--ignore-eod", "--sweep"]
        words += ["--input-lengths", "uniform:{}:{}".format(*PROMPT_TOKENS)]
        words += ["--output-lengths", "uniform:{}:{}".format(*NEW_TOKENS)]
        words += ["--request-rate", "2", "--duration-seconds", "15", "--goodput", *GOODPUT]
        run([sys.executable, "-m", "stages.benchmark", *words])
        rate: float | None = json.loads((out / "summary.json").read_text())["highest_rate"]
    if rate is None:
        raise RuntimeError(f"no rate meets {' '.join(GOODPUT)} on this machine")
    return rate


async def soak(url: str, process: int, rate: float, seconds: float) -> bool:
    """Whether the server stood it; prints a row for each law."""
    samples: list[int] = []
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        traffic = Traffic(url, session, seed=1)
        await traffic.burst(DynamicConfig().inference_dynamic_batching_max_requests)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch(process, traffic.found, samples))
            await traffic.run(rate, seconds)
            watching.cancel()
        in_use = await held_at_the_end(session, url)
        (engine,) = children(process)
        sizes = [f"{resident_bytes(one) / 2**20:.1f} MiB" for one in (process, engine)]
    found = traffic.found
    before, after, change = growth(samples)
    minutes = f"{seconds / 60:g} minutes"
    ends = ", ".join(f"{n} {end}" for end, n in sorted(found.ends.items()))
    errors = "".join(f"; {n} x {error}" for error, n in found.errors.most_common(5))
    total = f"{found.errors.total()} of {found.total} requests ({ends}){errors}"
    used = ", ".join(f"{name} {count:g}" for name, count in in_use.items())
    log.info("resident at the end: listening %s, engine %s", *sizes)
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
    least = LEAST_SAMPLES * SAMPLE_SECONDS / 60
    if given.minutes < least:
        parser.error(
            f"--minutes {given.minutes:g}: at least {least:g}, as the memory is looked at every "
            f"{SAMPLE_SECONDS:g} s and growth needs {LEAST_SAMPLES} looks"
        )
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
