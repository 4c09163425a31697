"""The work of the rows of `benchmarks.growth` about runs, their checkpoints and ranks."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.growth_cases import SEED, run_command, weights_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from trainyard.training.loop.ledger import StepRecord


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


def _record(step: int, steps: int) -> StepRecord:
    from trainyard.training.loop.ledger import StepRecord

    record = StepRecord(step, 8 * step, 1024 * step, 8, 9.0 / (1 + step / steps))
    record.learning_rate, record.weight_decay, record.grad_norm = 1e-4, 0.01, 1.5
    record.samples = record.rng = f"{step:016x}"
    return record


def _write_steps(folder: Path, count: int) -> str:
    """A ledger and timings of so many steps; the digest that the ledger leads to."""
    from trainyard.training.loop.ledger import chain

    folder.mkdir(exist_ok=True, parents=True)
    digest = ""
    with (
        (folder / "ledger.jsonl").open("w") as ledger,
        (folder / "timings.jsonl").open("w") as timings,
    ):
        for step in range(1, count + 1):
            line = _record(step, count).line()
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


def step(rank: int, size: int, scratch: Path) -> Callable[[], None]:
    """What a rank does to compare a hundred steps of a blend of 1,000 datasets with the ledger's
    order: its own samples and seeds, and on rank 0 the digests over all ranks."""
    import numpy as np

    from trainyard.datasets.blend import blend
    from trainyard.datasets.blended import Blended
    from trainyard.datasets.config import DataConfig
    from trainyard.parallel.dims import ParallelDims
    from trainyard.parallel.groups import ProcessGroups
    from trainyard.training.loop.batch_size import BatchSize
    from trainyard.training.loop.data import RunData
    from trainyard.training.loop.sample_check import ConsumedSamples, SampleCheck
    from trainyard.training.loop.seeds import generator_seed, microbatch_seed

    steps, datasets, random = 100, 1000, np.random.default_rng(SEED)
    chosen, within = blend(weights_of(datasets), steps * size)
    counts = np.bincount(chosen, minlength=datasets).tolist()

    class Source:
        def __init__(self, count: int) -> None:
            self.order = random.permutation(count).astype(np.uint32)

        def numbers(self, indices: NDArray[np.int64] | slice) -> NDArray[np.uint32]:
            return self.order[indices]

    blended: Any = Blended([Source(count) for count in counts], chosen, within)  # type: ignore[type-var]
    batch = BatchSize(size, micro_batch_size=1, dp=64)
    groups = ProcessGroups(ParallelDims(dp=batch.dp), rank)
    data = RunData(DataConfig(data_path=("none",)), blended, (), batch, rank)
    expected = data.expected_samples(0)

    def consumed(number: int) -> ConsumedSamples:
        taken = ConsumedSamples(number, batch.num_microbatches)
        own = np.arange((number - 1) * size, number * size)[rank :: batch.dp]
        taken.ids = list(blended.ids(own)[:, None])
        for micro in range(batch.num_microbatches):
            seed = microbatch_seed(SEED, number, micro * batch.dp + rank)
            taken.seeds[0, micro] = (generator_seed(seed, 0, 0, 0),)
        return taken

    every = [consumed(number) for number in range(1, steps + 1)]

    def check() -> None:
        for number, taken in enumerate(every, 1):
            SampleCheck(number, batch, SEED, groups, expected).check(taken)

    return check


def history(steps: int, scratch: Path) -> Callable[[], None]:
    """What a training keeps of its steps, on the way to steps that stay."""
    from trainyard.training.loop.ledger import Ledger
    from trainyard.training.loop.throughput import StepTiming, StepTimings

    def train() -> None:
        ledger, timings = Ledger(), StepTimings()
        for number in range(1, steps + 1):
            ledger.add(_record(number, steps))
            timings.append(StepTiming(number, 100.0, 1e5, 30.0, 0.1, 10**9))
            if number % 1000 == 0:
                ledger.forget()

    return train


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


def load_local(ranks: int, scratch: Path) -> Callable[[], None]:
    """What one rank plans of a load from nodes; imported here, since other rows measure their
    memory without torch."""
    from benchmarks import growth_load

    return growth_load.load_local(ranks, scratch)


def load_index(ranks: int, scratch: Path) -> Callable[[], None]:
    """The index that each rank reads for it."""
    from benchmarks import growth_load

    return growth_load.load_index(ranks, scratch)


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


def step_files(ranks: int, scratch: Path) -> Callable[[], int]:
    """Files of a GPT of 100 layers, 8,192 wide: tp 8, pp 5, a distributed optimizer."""
    from trainyard.checkpoint.plan import Slice
    from trainyard.checkpoint.save import plan_step

    width, layers, tp, pp = 8192, 100, 8, 5
    dp = ranks // (tp * pp)
    matrices = {"qkv": (3 * width, width, 0), "proj": (width, width, 1)}
    matrices |= {"fc1": (4 * width, width, 0), "fc2": (width, 4 * width, 1)}

    def of_model(tensor: int, layer: int) -> list[Slice]:
        """A layer's part of one rank of tensor parallelism."""
        slices = []
        for name, (rows, columns, dim) in matrices.items():
            shape = [rows, columns]
            shape[dim] //= tp
            offset = [0, 0]
            offset[dim] = tensor * shape[dim]
            where = (rows, columns), tuple(offset), tuple(shape)
            slices.append(Slice(f"model.{layer}.{name}", "BF16", *where))
        return slices

    def of_optimizer(replica: int, stage: int, tensor: int) -> list[Slice]:
        """Weights and moments in fp32 of a rank's part of the stage."""
        total = 12 * width * width * layers // (tp * pp)
        own = total // dp
        return [
            Slice(
                f"optimizer.{kind}.{stage}.{tensor}", "F32", (own * dp,), (own * replica,), (own,)
            )
            for kind in ("weights", "exp_avg", "exp_avg_sq")
        ]

    held = []
    for replica in range(dp):
        for stage in range(pp):
            of_stage = range(stage * layers // pp, (stage + 1) * layers // pp)
            for tensor in range(tp):
                model = [part for layer in of_stage for part in of_model(tensor, layer)]
                held.append(model + of_optimizer(replica, stage, tensor))

    def plan() -> int:
        hosts = [rank - rank % 8 for rank in range(ranks)]
        return len(plan_step(held, 4 * 2**30, hosts))

    return plan


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
