"""Time and memory of a save by ranks of one host that share files, beside files of their own.

    python -m benchmarks.save_ranks                        2, 4 and 8 ranks of 97 MB, medians of 5
    python -m benchmarks.save_ranks --ranks 4 --mb 200     others
    python -m benchmarks.save_ranks --url s3://bucket/x    into the store of AWS_ENDPOINT_URL

Both kinds in turn, in the same processes, on gloo; what is saved is synced. A save in the
background blocks while it is prepared and copied; `durable` is when its step is published."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.checkpoint import contents, resident_bytes
from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.checkpoint.background import BackgroundSave
from trainyard.checkpoint.handover import find_places
from trainyard.checkpoint.layout import LocalTensors, ShardedTensor
from trainyard.checkpoint.ranks import Ranks
from trainyard.checkpoint.save import prepare_step, save_step
from trainyard.testing.distributed import run_distributed

WAYS = ("own files", "shared")
MATRICES = 12

Figures = dict[str, list[float]]
"""Of one rank in one way: the values of all runs, by what was measured."""


def share(mb: int) -> dict[str, LocalTensors]:
    """This rank's part of some matrices, `mb` million bytes in all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = mb * 10**6 // (4 * 1024 * MATRICES)
    whole, at = (rows * world, 1024), (rows * rank, 0)
    names = [f"optimizer.exp_avg.{number}" for number in range(MATRICES)]
    return {name: ShardedTensor(name, torch.randn(rows, 1024), whole, at) for name in names}


def measure(url: str, mb: int, runs: int) -> list[Figures]:
    """On each rank: figures of both ways."""
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    alone = Ranks(dist.group.WORLD, rank, world)
    thread = Ranks(dist.new_group(backend="gloo"), rank, world)
    places = find_places(alone)
    assert places.places == (0,) * world, places
    tensors, step = share(mb), contents()
    saving = BackgroundSave(thread)
    found: list[Figures] = [{}, {}]
    for number in range(runs + 1):
        for figures, ranks in zip(found, (alone, places), strict=True):
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            before = resident_bytes("VmRSS")
            dist.barrier()
            began = time.perf_counter()
            save_step(join(url, "run"), 1, tensors, step, ranks)
            values = {"waited for": time.perf_counter() - began}
            values["memory"] = (resident_bytes("VmHWM") - before) / 1e6
            dist.barrier()
            began = time.perf_counter()
            prepared = prepare_step(join(url, "run"), 1, tensors, "benchmark", ranks)
            saving.start(prepared, step, time.monotonic(), lambda *_: None)
            values["blocked"] = time.perf_counter() - began
            saving.finish()
            values["durable"] = time.perf_counter() - began
            if number:  # the first makes the folders and the snapshot's memory
                for name, value in values.items():
                    figures.setdefault(name, []).append(value)
    if rank == 0:
        store.delete_tree(join(url, "run"))
    return found


def row(way: str, ranks: int, found: Sequence[Figures]) -> str:
    """A line of the table: of each run the slowest rank, and the largest peak."""

    def seconds(name: str) -> str:
        slowest = [max(values) for values in zip(*(f[name] for f in found), strict=True)]
        return f"{statistics.median(slowest):.3f} ({min(slowest):.3f}-{max(slowest):.3f})"

    memory = max(value for figures in found for value in figures["memory"])
    times = " | ".join(seconds(name) for name in ("waited for", "blocked", "durable"))
    return f"| {ranks} | {way} | {times} | {memory:.0f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--mb", type=int, default=97, help="bytes of a rank, in 10^6")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--scratch", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--url", help="a folder in a store instead")
    args = parser.parse_args()
    print("| ranks | files | waited for, s | blocked, s | durable, s | memory of a rank, MB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for count in args.ranks:
        with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
            options = (args.url or folder, args.mb, args.runs)
            found = run_distributed(measure, count, "gloo", *options)
        for number, way in enumerate(WAYS):
            print(row(way, count, [figures[number] for figures in found]), flush=True)


if __name__ == "__main__":
    main()
