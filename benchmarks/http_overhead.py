"""What HTTP costs: output tokens a second of a server beside those of its engine in process.

    python -m benchmarks.http_overhead
    python -m benchmarks.http_overhead --runs 3 --server-cores 4

`stages.benchmark` sends the same streamed requests, 64 at a time, to `stages.serve` and to the
dynamic engine in its own process, in turn. The server and the engine have the same cores, one
unless --server-cores says more, and one thread of torch. The client of the server has the others,
so that its work does not count as the server's. On one core nothing hides what the server does: it
is time that the engine lacks.

The model has the quick start's shape and random weights. The ratio is the median of those of the
runs. Beside it are the processor times of the server for each token: its event loop, which does
all that HTTP needs, and its engine."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.corpus import report
from benchmarks.served import pinned, run, served
from benchmarks.served_model import model_folder

LEAST = 0.9
"""Of the engine's rate."""
LENGTHS, NEW = "uniform:16:48", "uniform:32:96"
"""Of many lengths, so that requests begin and end at different steps of either engine: over HTTP
they do so anyway, and a batch that stays in step is faster."""
MEAN_NEW = 64
WARM_UPS = 8
TICKS = os.sysconf("SC_CLK_TCK")


def rate(cores: set[int], *words: str) -> float:
    """Output tokens a second of a load; RuntimeError if a request of it failed."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        run(pinned(cores, "stages.benchmark", *words, "--output-dir", str(out)))
        (one,) = json.loads((out / "summary.json").read_text())["measurements"]
    if one["num_failed"]:
        raise RuntimeError(f"{one['num_failed']} requests failed: {one['errors']}")
    found: float = one["output_tokens_per_second"]
    return found


def thread_seconds(process: int) -> tuple[float, float]:
    """Processor time of the first thread of a process, and of all others."""
    seconds = {}
    for folder in Path(f"/proc/{process}/task").iterdir():
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        seconds[int(folder.name)] = (int(fields[11]) + int(fields[12])) / TICKS  # user, system
    first = seconds.pop(process)
    return first, sum(seconds.values())


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--load", help="checkpoint; unset: random weights")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--server-cores", type=int, default=1)
    given = parser.parse_args()
    free = sorted(os.sched_getaffinity(0))
    if not 0 < given.server_cores < len(free):
        parser.error(f"--server-cores: from 1 to {len(free) - 1}, as the client needs one too")
    mine, rest = set(free[: given.server_cores]), set(free[given.server_cores :])
    words = ["--concurrency", str(given.concurrency), "--num-requests", str(given.requests)]
    words += ["--input-lengths", LENGTHS, "--output-lengths", NEW, "--ignore-eod"]
    words += ["--num-warmups", str(WARM_UPS)]
    rates: dict[str, list[float]] = {"engine": [], "server": []}
    with model_folder(given.load) as load:
        command = pinned(mine, "stages.serve", "--load", load, "--device", "cpu")
        of_engine = ["--load", load, "--engine-type", "dynamic", "--device", "cpu", *words]
        with served(command) as (url, process):
            of_server = ["--url", url, "--load", load, *words]
            rate(rest, *of_server)  # a first run of each, which is not counted
            before = thread_seconds(process)
            for _ in range(given.runs):
                rates["engine"].append(rate(mine, *of_engine))
                rates["server"].append(rate(rest, *of_server))
            loop, engine = (b - a for a, b in zip(before, thread_seconds(process), strict=True))
    ratios = [a / b for a, b in zip(rates["server"], rates["engine"], strict=True)]
    tokens = given.runs * (given.requests + WARM_UPS) * MEAN_NEW
    reached = (
        f"{statistics.median(rates['server']):,.0f} output tok/s, engine in process "
        f"{statistics.median(rates['engine']):,.0f}: {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f}-{max(ratios):.3f}); processor time per token: event loop "
        f"{loop / tokens * 1e6:.0f} us, engine {engine / tokens * 1e6:.0f} us"
    )
    cores = f"{given.server_cores} core{'s' * (given.server_cores > 1)}"
    name = f"HTTP, {given.concurrency} concurrent, {cores} for server and engine"
    report(name, reached, f"{LEAST}", statistics.median(ratios) >= LEAST)


if __name__ == "__main__":
    main()
