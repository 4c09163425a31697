"""What HTTP costs: output tokens a second of a server beside those of its engine in process.

    python -m benchmarks.http_overhead
    python -m benchmarks.http_overhead --runs 3 --requests 128
    python -m benchmarks.http_overhead --engine-core

`stages.benchmark` sends the same streamed requests, 64 at a time, to `stages.serve` and to the
dynamic engine in its own process, in turn. Both times the engine has one thread of torch, and all
programs together have the same cores. Two let the engine of the server compute beside the process
that listens and the client; in process, the engine and its client take turns in running Python.
With --engine-core the engine of the server has the first core for itself, and the process that
listens shares the others with the client, as they would have others on a larger machine: with
three processes on two cores the kernel lets the client interrupt the engine, and moves that to the
other core, whose caches know nothing of it.

The model has the quick start's shape and random weights. The ratio is the median of those of the
runs. Beside it are the processor times of the server for each token, without those of its start:
of the process that listens, which does all that HTTP needs, and of its engine."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.corpus import report
from benchmarks.resident import children
from benchmarks.served import pinned, run, served
from benchmarks.served_model import model_folder

LEAST = 0.9
"""Of the engine's rate."""
LENGTHS, NEW = "uniform:16:48", "uniform:32:96"
"""Of many lengths, so that requests begin and end at different steps of either engine: over HTTP
they do so anyway, and a batch that stays in step is faster."""
MEAN_NEW = 64
WARM_UPS = 2
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


def cpu_seconds(process: int) -> float:
    """Processor time of a process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS  # user, system


def bind(process: int, cores: set[int]) -> None:
    """All threads of a process to some cores."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--load", help="checkpoint; unset: random weights")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--engine-core", action="store_true", help="give the engine one for itself")
    given = parser.parse_args()
    cores = os.sched_getaffinity(0)
    words = ["--concurrency", str(given.concurrency), "--num-requests", str(given.requests)]
    words += ["--input-lengths", LENGTHS, "--output-lengths", NEW, "--ignore-eod"]
    words += ["--num-warmups", str(WARM_UPS)]
    rates: dict[str, list[float]] = {"engine": [], "server": []}
    with model_folder(given.load) as load:
        command = pinned(cores, "stages.serve", "--load", load, "--device", "cpu")
        of_engine = ["--load", load, "--engine-type", "dynamic", "--device", "cpu", *words]
        with served(command) as (url, process):
            (engine,) = children(process)
            of_server = ["--url", url, "--load", load, *words]
            others = cores
            if given.engine_core:
                first, *rest = sorted(cores)
                others = set(rest)
                bind(engine, {first})
                bind(process, others)
            rate(others, *of_server)  # a first run of each, which is not counted
            before = cpu_seconds(process), cpu_seconds(engine)
            for _ in range(given.runs):
                rates["engine"].append(rate(cores, *of_engine))
                rates["server"].append(rate(others, *of_server))
            listening = cpu_seconds(process) - before[0]
            computing = cpu_seconds(engine) - before[1]
    ratios = [a / b for a, b in zip(rates["server"], rates["engine"], strict=True)]
    tokens = given.runs * (given.requests + WARM_UPS) * MEAN_NEW
    reached = (
        f"{statistics.median(rates['server']):,.0f} output tok/s, engine in process "
        f"{statistics.median(rates['engine']):,.0f}: {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f}-{max(ratios):.3f}); processor time per token: listening "
        f"{listening / tokens * 1e6:.0f} us, engine {computing / tokens * 1e6:.0f} us"
    )
    name = f"HTTP, {given.concurrency} concurrent, {len(cores)} cores"
    name += ", one of them the engine's" if given.engine_core else ""
    report(name, reached, f"{LEAST}", statistics.median(ratios) >= LEAST)


if __name__ == "__main__":
    main()
