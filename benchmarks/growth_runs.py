"""The work of the rows of `benchmarks.growth` about runs, their checkpoints and ranks."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from benchmarks.growth_cases import run_command


def run_manifest(count: int, scratch: Path) -> Callable[[], None]:
    """What a rerun of a finished run looks at, without the listing itself."""
    from trainyard.artifacts.manifest import Manifest, PartRecord, read_manifest
    from trainyard.artifacts.parts import wrong_file

    steps = [f"iter_{number:07d}" for number in range(100)]
    parts = tuple(PartRecord(step, "0" * 64, count, count // 100) for step in steps)
    path = scratch / f"run-{count}.json"
    path.write_text(json.dumps(Manifest(stage="pretrain", parts=parts).to_document()))
    sizes = {f"{step}/manifest.json": 1000 for step in steps}
    sizes |= {f"{step}/m-{n:05d}.safetensors": 100 for step in steps for n in range(count // 100)}

    def look() -> None:
        found = read_manifest(str(path))
        assert found is not None
        assert wrong_file("unread", found[0], sizes) is None

    return look


def _write_steps(folder: Path, count: int) -> str:
    """A ledger and timings of so many steps; the digest that the ledger leads to."""
    from trainyard.training.loop.ledger import StepRecord, chain

    folder.mkdir(exist_ok=True, parents=True)
    digest = ""
    with (
        (folder / "ledger.jsonl").open("w") as ledger,
        (folder / "timings.jsonl").open("w") as timings,
    ):
        for step in range(1, count + 1):
            record = StepRecord(step, 8 * step, 1024 * step, 8, 9.0 / (1 + step / count))
            record.learning_rate, record.weight_decay, record.grad_norm = 1e-4, 0.01, 1.5
            record.samples = record.rng = f"{step:016x}"
            line = record.line()
            digest = chain([line], digest)
            ledger.write(line + "\n")
            timing = {"step": step, "ms": 100.0, "tokens_per_second": 1e5, "tflops_per_gpu": 30.0}
            timings.write(json.dumps(timing | {"data_wait_ms": 0.1, "memory_bytes": 10**9}) + "\n")
    return digest


def _publish(folder: Path, *names: str) -> None:
    from trainyard.artifacts.lines import file_record
    from trainyard.artifacts.manifest import Manifest

    files = tuple(file_record(str(folder / name), name) for name in names)
    document = Manifest(stage="pretrain", files=files).to_document()
    (folder / "manifest.json").write_text(json.dumps(document))


def report(count: int, scratch: Path) -> Callable[[], None]:
    """The run card of a finished run."""
    run = scratch / f"run-of-{count}"
    _write_steps(run, count)
    _publish(run, "ledger.jsonl", "timings.jsonl")
    command = [sys.executable, "-m", "stages.report", "--checkpoint", str(run)]
    return lambda: run_command([*command, "--output-prefix", str(run / "card")])


def resume(count: int, scratch: Path) -> Callable[[], None]:
    """The ledgers of a run that resumes, all lines in one step."""
    from trainyard.training.run.step_ledgers import read_ledgers

    step = scratch / f"resumed-{count}" / "iter_0000001"
    digest = _write_steps(step, count)
    (step / "state.json").write_text(json.dumps({"ledger_digest": digest}))
    _publish(step, "ledger.jsonl", "state.json")

    def look() -> None:
        (ledger,) = read_ledgers(str(step.parent), (1,))
        assert ledger.fault == ""

    return look


# --- checkpoints and ranks ----------------------------------------------------------------------


def shards(count: int, scratch: Path) -> Callable[[], None]:
    """The files of a reshard."""
    from trainyard.checkpoint.plan import Slice, plan_shards

    shapes = [(64 + number % 97, 64) for number in range(12_000)]
    slices = [Slice(f"model.{n}", "BF16", shape, (0, 0), shape) for n, shape in enumerate(shapes)]

    def plan() -> None:
        assert len(plan_shards("model", slices, count)) == count

    return plan


def load_plan(ranks: int, scratch: Path) -> Callable[[], None]:
    """What one rank plans of a load of 400 matrices, cut by columns over tp 8, the rest replicas:
    its own boxes divided, and the boxes of its replica located."""
    import torch

    from trainyard.checkpoint.copies import divide
    from trainyard.checkpoint.index import TensorEntry, TensorPiece, locate
    from trainyard.checkpoint.read_jobs import locate_all

    shape, tp = (4096, 4096), 8
    entry = TensorEntry("BF16", shape, (TensorPiece("f.safetensors", "k", (0, 0), shape),))
    memory = torch.empty((4096, 512), dtype=torch.bfloat16, device="meta")
    replica = [
        [(f"model.{number}", (0, 512 * rank), memory) for number in range(400)]
        for rank in range(tp)
    ]

    def plan() -> None:
        parts = [divide(boxes, max(1, ranks // tp))[0] for boxes in replica]
        requests = [[(n, o, tuple(m.shape)) for n, o, m in boxes] for boxes in parts]
        locate_all(requests, lambda _, offset, size: locate(entry, offset, size))

    return plan


def hang(ranks: int, scratch: Path) -> Callable[[], None]:
    """The collector's part, on a store, without the processes of the other ranks."""
    from torch.distributed import TCPStore

    from trainyard.training.loop.state import TrainState
    from trainyard.training.watch.hang import POSITIONS, HangWatch, RankPosition
    from trainyard.training.watch.rank_mailbox import StoreMailbox

    mailbox = StoreMailbox(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    for rank in range(1, ranks):
        waits = rank != ranks // 2
        position = RankPosition(rank, 9, "all_reduce" if waits else "read", waits)
        mailbox.append(POSITIONS, json.dumps(asdict(position)) + "\n")

    def report() -> None:
        ended: list[Exception] = []
        over = threading.Event()

        def end(error: Exception) -> None:
            ended.append(error)
            over.set()

        watch = HangWatch(0, ranks, mailbox, scratch, 0.1 / 60, end=end, poll_seconds=0.05)
        watch.begin(TrainState(step=9))
        over.wait(120)
        assert f"rank {ranks // 2} is behind" in str(ended[0]), ended

    return report


SMALL_GPT = {
    "tokenizer-type": "NullTokenizer",
    "vocab-size": 127,
    "hidden-size": 32,
    "num-attention-heads": 8,
    "seq-length": 16,
    "max-position-embeddings": 16,
    "micro-batch-size": 1,
    "global-batch-size": 1,
    "train-iters": 1,
    "save-interval": 1,
    "lr": 1e-3,
}


def reshard(layers: int, scratch: Path) -> Callable[[], None]:
    """A step with optimizer states to Megatron-Core's layout, tp 8."""
    run, out = scratch / f"layers-{layers}", scratch / f"core-{layers}"
    words = [word for name, value in SMALL_GPT.items() for word in (f"--{name}", str(value))]
    words += ["--mock-data", "--num-layers", str(layers), "--save", str(run)]
    run_command([sys.executable, "-m", "stages.pretrain", *words])
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "stages.reshard", "--load-dir", str(run), "--saver", "core"]
    command += ["--target-tensor-parallel-size", "8", "--save-dir", str(out)]
    return lambda: run_command(command)
