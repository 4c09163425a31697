"""Speed and memory of checkpoints, each figure beside `cp` of the same bytes in the same run.

    python -m benchmarks.checkpoint                 every row, medians of 5: some minutes
    python -m benchmarks.checkpoint save --runs 1   some rows, a quick look

Rows: save, load (a state of 2 GB on the CPU, a local disk, files in the page cache) and reshard
(the same in 8 files, to one file and back). Prints a table row as each is done."""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.corpus import report
from benchmarks.measure import run_once
from trainyard.checkpoint.load import open_checkpoint, restore
from trainyard.checkpoint.save import StepContents, save_step
from trainyard.checkpoint.steps import step_folder

STATE_BYTES = 2_000_000_000
WIDTH = 2048
ROWS = 8192
STEP = 100


@dataclass(slots=True)
class Times:
    """Seconds of ours and of `cp`, run in turn."""

    ours: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)
    beyond_bytes: int = 0
    """Peak memory beyond the state."""

    @property
    def ratio(self) -> float:
        """Rate of ours over that of `cp`: of medians."""
        return statistics.median(self.peer) / statistics.median(self.ours)

    def text(self) -> str:
        """For the table."""
        ours, peer = statistics.median(self.ours), statistics.median(self.peer)
        spread = f"{min(self.ours):.2f}-{max(self.ours):.2f}"
        return f"{ours:.2f} s ({spread}); cp {peer:.2f} s: {self.ratio:.2f}x"


def make_state() -> dict[str, torch.Tensor]:
    """fp32 matrices of 64 MB: parameters and two moments alike."""
    generator = torch.Generator().manual_seed(0)
    each = ROWS * WIDTH * 4
    kinds = ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")
    return {
        f"{kinds[k % 3]}layers.{k // 3}.weight": torch.randn(ROWS, WIDTH, generator=generator)
        for k in range(STATE_BYTES // each)
    }


def contents() -> StepContents:
    """What is no tensor."""
    return StepContents({}, {"config.json": {}}, {}, "benchmark", "benchmark")


def resident_bytes(field_name: str) -> int:
    """VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field_name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel tells no {field_name}")


def timed(work: Callable[[], object], times: Times) -> None:
    """One run of ours, and the memory that it took."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident_bytes("VmRSS")
    began = time.perf_counter()
    work()
    times.ours.append(time.perf_counter() - began)
    times.beyond_bytes = max(times.beyond_bytes, resident_bytes("VmHWM") - before)


def copy(source: Path, target: Path, times: Times) -> None:
    """`cp` into a fresh folder."""
    shutil.rmtree(target, ignore_errors=True)
    began = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
    times.peer.append(time.perf_counter() - began)


def row_save(scratch: Path, runs: int) -> None:
    """Write and publish."""
    state, times = make_state(), Times()
    for number in range(runs + 1):
        shutil.rmtree(scratch / "run", ignore_errors=True)
        timed(lambda: save_step(str(scratch / "run"), STEP, state, contents()), times)
        copy(scratch / "run", scratch / "copy", times)
        if number == 0:  # it makes the folders and warms up
            times = Times()
    ok = times.ratio >= 0.8 and times.beyond_bytes < 300e6
    beyond = f", {times.beyond_bytes / 1e6:.0f} MB beyond the state"
    report("save 2 GB, local disk", times.text() + beyond, "0.8x cp, 300 MB", ok)


def row_load(scratch: Path, runs: int) -> None:
    """Into tensors that are there."""
    state, times = make_state(), Times()
    save_step(str(scratch / "run"), STEP, state, contents())
    targets = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    def load() -> None:
        with open_checkpoint(str(scratch / "run")) as checkpoint:
            restore(checkpoint, targets, "")

    for number in range(runs + 1):
        timed(load, times)
        copy(scratch / "run", scratch / "copy", times)
        if number == 0:
            times = Times()
    assert all(torch.equal(targets[name], tensor) for name, tensor in state.items())
    ok = times.ratio >= 0.8 and times.beyond_bytes < 300e6
    beyond = f", {times.beyond_bytes / 1e6:.0f} MB beyond the state"
    report("load 2 GB, local disk", times.text() + beyond, "0.8x cp, 300 MB", ok)


def row_reshard(scratch: Path, runs: int) -> None:
    """To one file and back to eight; whole commands."""
    save_step(str(scratch / "run"), STEP, make_state(), contents(), shard_size_bytes=250_000_000)
    times, peak = Times(), 0.0
    source = scratch / "run" / step_folder(STEP)
    for number in range(runs + 1):
        places = [str(scratch / "run"), str(scratch / "one"), str(scratch / "eight")]
        seconds = 0.0
        for load, save, count in ((0, 1, 1), (1, 2, 8)):
            shutil.rmtree(places[save], ignore_errors=True)
            command = [sys.executable, "-m", "stages.reshard", "--load-dir", places[load]]
            command += ["--save-dir", places[save], "--num-shards", str(count)]
            run = run_once(command)
            seconds, peak = seconds + run.wall_seconds, max(peak, run.peak_bytes / 1e6)
        times.ours.append(seconds / 2)
        copy(source, scratch / "copy", times)
        if number == 0:
            times = Times()
    ok = 1 / times.ratio <= 2.0 and peak < 1000
    reached = f"{times.text()} of the rate, each way, {peak:.0f} MB"
    report("reshard 2 GB, whole command", reached, "2x the time of cp, 1 GB", ok)


TABLE = {"save": row_save, "load": row_load, "reshard": row_reshard}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("rows", nargs="*", choices=[[], *TABLE], help="all, if none is named")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--scratch", type=Path, help="a folder on the disk to measure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        for name in arguments.rows or TABLE:
            TABLE[name](Path(folder), arguments.runs)


if __name__ == "__main__":
    main()
