"""Speed and memory of checkpoints, each figure beside `cp` of the same bytes in the same run.

    python -m benchmarks.checkpoint                 every row but S3, medians of 5: some minutes
    python -m benchmarks.checkpoint save --runs 1   some rows, a quick look

Rows: save and load (a state of 2 GB on the CPU, a local disk, files in the page cache), reshard
(the same as tp4 pp2 wrote it, to one file of each kind and back), torch (1.7 GB of Megatron-LM's
files into a step of ours) and s3 (8 ranks load it from the store that AWS_ENDPOINT_URL names).
Prints a table row as each is done.

What is saved is synced. `cp` is not, so beside it stands `cp` with a sync of what it wrote."""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks import s3
from benchmarks.corpus import report
from benchmarks.load_ranks import load_on_ranks
from benchmarks.measure import run_once
from trainyard.checkpoint.layout import ShardedTensor
from trainyard.checkpoint.load import open_checkpoint, restore
from trainyard.checkpoint.plan import SHARD_SIZE_BYTES, Slice
from trainyard.checkpoint.ranks import ALONE
from trainyard.checkpoint.save import PreparedStep, StepContents, plan_step, save_step, write_step
from trainyard.checkpoint.steps import step_folder
from trainyard.config import to_dict
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel

STATE_BYTES = 2_000_000_000
WIDTH = 2048
ROWS = 8192
STEP = 100
VOCAB = 16384
ADAM = {
    "lr": 1e-4,
    "min_lr": 1e-5,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
}
"""What Megatron-LM keeps with the states of its optimizer."""


@dataclass(slots=True)
class Times:
    """Seconds of ours and of `cp`, run in turn."""

    ours: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)
    synced: list[float] = field(default_factory=list)
    """Of `cp` until its bytes are on the disk."""
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
        text = f"{ours:.2f} s ({spread}); cp {peer:.2f} s: {self.ratio:.2f}x"
        if self.synced:
            synced = statistics.median(self.synced)
            text += f"; cp and sync {synced:.2f} s: {synced / ours:.2f}x"
        return text


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
    raise RuntimeError(f"/proc/self/status has no {field_name}")


def timed(work: Callable[[], object], times: Times) -> None:
    """One run of ours, and the memory that it took."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident_bytes("VmRSS")
    began = time.perf_counter()
    work()
    times.ours.append(time.perf_counter() - began)
    times.beyond_bytes = max(times.beyond_bytes, resident_bytes("VmHWM") - before)


def copy(source: Path, target: Path, times: Times, *, sync: bool = False) -> None:
    """`cp` into a fresh folder. The disk is left idle: what `cp` has not written yet would be in
    the way of whoever comes next."""
    shutil.rmtree(target, ignore_errors=True)
    began = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
    times.peer.append(time.perf_counter() - began)
    files = [str(path) for path in target.rglob("*") if path.is_file()]
    subprocess.run(["sync", *files], check=True)
    if sync:
        times.synced.append(time.perf_counter() - began)


def row_save(scratch: Path, runs: int) -> None:
    """Write and publish."""
    state, times = make_state(), Times()
    for number in range(runs + 1):
        shutil.rmtree(scratch / "run", ignore_errors=True)
        timed(lambda: save_step(str(scratch / "run"), STEP, state, contents()), times)
        read_all(scratch / "run")
        copy(scratch / "run", scratch / "copy", times, sync=True)
        if number == 0:  # it makes the folders and warms up
            times = Times()
    ok = times.ratio >= 0.8 and times.beyond_bytes < 300e6
    beyond = f", {times.beyond_bytes / 1e6:.0f} MB beyond the state"
    report("save 2 GB, local disk, synced", times.text() + beyond, "0.8x cp, 300 MB", ok)


def read_all(folder: Path) -> None:
    """Bring files into the page cache, where what `cp` reads is to be."""
    for path in folder.rglob("*"):
        if path.is_file():
            subprocess.run(["cat", str(path)], stdout=subprocess.DEVNULL, check=True)


def row_load(scratch: Path, runs: int) -> None:
    """Into tensors that are there."""
    state, times = make_state(), Times()
    save_step(str(scratch / "run"), STEP, state, contents())
    read_all(scratch / "run")
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


def save_in_ranks(root: Path, state: Mapping[str, torch.Tensor], tp: int, pp: int) -> None:
    """What so many ranks write: layers on pp stages; of each matrix tp slices, of rows and of
    columns in turn."""
    held: dict[tuple[int, int], dict[Slice, torch.Tensor]] = defaultdict(dict)
    for number, (name, tensor) in enumerate(state.items()):
        dim = number // 3 % 2
        for rank, part in enumerate(tensor.chunk(tp, dim)):
            offset = tuple(rank * part.shape[dim] if d == dim else 0 for d in range(2))
            item = ShardedTensor(name, part, tuple(tensor.shape), offset).slice
            held[number * pp // len(state), rank][item] = part
    planned = plan_step([list(parts) for parts in held.values()], SHARD_SIZE_BYTES)
    own = {item: part for parts in held.values() for item, part in parts.items()}
    files = tuple(replace(file, writer=0) for file in planned)
    url = str(root / step_folder(STEP))
    write_step(PreparedStep(url, STEP, files, own, None), contents(), ALONE)


def row_reshard(scratch: Path, runs: int) -> None:
    """To one file of each kind and back to eight; whole commands."""
    state = make_state()
    save_in_ranks(scratch / "run", state, tp=4, pp=2)
    read_all(scratch / "run")
    one = ["--target-tensor-parallel-size", "1", "--target-pipeline-parallel-size", "1"]
    eight = ["--target-tensor-parallel-size", "4", "--target-pipeline-parallel-size", "2"]
    times, peak = Times(), 0.0
    for number in range(runs + 1):
        seconds = 0.0
        for load, save, sizes in (("run", "one", one), ("one", "eight", eight)):
            shutil.rmtree(scratch / save, ignore_errors=True)
            command = [sys.executable, "-m", "stages.reshard", "--load-dir", str(scratch / load)]
            run = run_once([*command, "--save-dir", str(scratch / save), *sizes])
            seconds, peak = seconds + run.wall_seconds, max(peak, run.peak_bytes / 1e6)
            read_all(scratch / save)
        times.ours.append(seconds / 2)
        copy(scratch / "run", scratch / "copy", times)
        if number == 0:
            times = Times()
    for name in ("one", "eight"):
        with open_checkpoint(str(scratch / name)) as checkpoint:
            assert all(torch.equal(checkpoint.read(key), state[key]) for key in state)
    ok = 1 / times.ratio <= 2.0 and peak < 1000
    reached = f"{times.text()} of the rate, each way, {peak:.0f} MB, bit-equal"
    report("reshard 2 GB tp4 pp2 to tp1 pp1 and back", reached, "2x the time of cp, 1 GB", ok)


def row_torch(scratch: Path, runs: int) -> None:
    """Megatron-LM's files, tp2 pp2 with the optimizer, into a step of ours; whole commands."""
    config = GPTConfig(num_layers=10, hidden_size=1024, num_attention_heads=16, seq_length=1024)
    with torch.device("meta"):
        model = GPTModel(config, VOCAB)
    weights = {name: torch.empty(p.shape).normal_() for name, p in model.state_dict().items()}
    kinds = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    state = {f"{kind}.{name}": tensor for kind in kinds for name, tensor in weights.items()}
    document = {"model": to_dict(config), "vocab_size": VOCAB, "padded_vocab_size": VOCAB}
    documents = {"config.json": {**document, "run": ADAM}}
    step = replace(contents(), state={"num_updates": STEP}, documents=documents)
    save_step(str(scratch / "run"), STEP, state, step)
    reshard = [sys.executable, "-m", "stages.reshard", "--load-dir"]
    sizes = ["--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2"]
    theirs = str(scratch / "theirs")
    run_once([*reshard, str(scratch / "run"), "--save-dir", theirs, "--saver", "core", *sizes])
    times, peak = Times(), 0.0
    for number in range(runs + 1):
        shutil.rmtree(scratch / "ours", ignore_errors=True)
        run = run_once([*reshard, theirs, "--save-dir", str(scratch / "ours")])
        times.ours.append(run.wall_seconds)
        peak = max(peak, run.peak_bytes / 1e6)
        copy(Path(theirs), scratch / "copy", times)
        if number == 0:
            times = Times()
    with open_checkpoint(str(scratch / "ours")) as checkpoint:
        assert all(torch.equal(checkpoint.read(name), state[name]) for name in state)
    size = sum(tensor.nbytes for tensor in state.values()) / 1e9
    reached = f"{times.text()} of the rate, {peak:.0f} MB for {size:.1f} GB, bit-equal"
    report("Megatron-LM's torch files, tp2 pp2, to ours", reached, "1 GB", peak < 1000)


def row_s3(scratch: Path, runs: int) -> None:
    """Eight ranks, tp4 dp2, from an object store."""
    state = make_state()
    save_in_ranks(scratch / "run", state, tp=4, pp=2)
    url = s3.upload_folder(scratch / "run", "checkpoint")
    size = sum(tensor.nbytes for tensor in state.values())
    found = [load_on_ranks(url, tp=4, dp=2) for _ in range(runs)]
    ratio = max(load.bytes for load in found) / size
    seconds = statistics.median(load.seconds for load in found)
    reached = f"{ratio:.3f} times each byte in total, documents too; {seconds:.1f} s"
    report("load 2 GB on 8 ranks, tp4 dp2, S3", reached, "1.1 times", ratio <= 1.1)


TABLE = {
    "save": row_save,
    "load": row_load,
    "reshard": row_reshard,
    "torch": row_torch,
    "s3": row_s3,
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "rows", nargs="*", choices=[[], *TABLE], help="all but s3, if none is named"
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--scratch", type=Path, help="a folder on the disk to measure")
    arguments = parser.parse_args()
    for name in arguments.rows or [row for row in TABLE if row != "s3"]:
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
            TABLE[name](Path(folder), arguments.runs)


if __name__ == "__main__":
    main()
