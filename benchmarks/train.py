"""Training speed on GPUs: the real stage with data loading, beside a plain torch loop.

    python -m benchmarks.train                                one GPU, every shape
    python -m benchmarks.train gpt-1.3b --layout tp2 --gpus 2
    python -m benchmarks.train llama-8b-half --fp8-format e4m3 --fp8-recipe blockwise
    python -m benchmarks.train gpt-1.3b --profile --json FILE

Options that it does not have itself go to the stage.
Each row is one run of `stages.pretrain` over token files that are made first (random tokens, so
that the loss stays where it begins and nothing is learnt), medians of the steps after the first
ten; the peer is `benchmarks.plain_torch` in a process of its own, on the same GPU, before it. It
computes in bf16, so it is no peer with --fp8-format. Each figure is told on stderr at once.
With --profile the run takes three steps more, under torch's profiler; the table of their kernels
(`benchmarks.kernel_table`) follows, and lies beside the trace as kernels.md and kernels.json.
Memory is the peak of torch's allocator on the first rank, and in brackets what `stages.plan` says
as a share of it, where it counts the tensors of the shape. The time to the first step is from the
start of the command to the end of that step."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks import megatron_peer
from benchmarks.energy import joules
from benchmarks.figures import Record, gpu_state
from benchmarks.kernel_table import KernelTable, kernel_table, markdown, read_trace
from benchmarks.shapes import SHAPES, Shape, share_of_peak
from trainyard.corpus.indexed import IndexedWriter

STEPS, WARMUP = 30, 10
PROFILED = 3
"""Steps after these, with --profile."""
LOGGED = re.compile(r"iteration +(\d+)/")

PEERS = {"plain": "plain torch loop", "megatron": "Megatron-Core"}

LAYOUTS: dict[str, list[str]] = {
    "": [],
    "tp2": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
    "pp2": ["--pipeline-model-parallel-size", "2"],
    "cp2": ["--context-parallel-size", "2"],
    "ep2": [
        *("--expert-model-parallel-size", "2", "--use-distributed-optimizer"),
        *("--overlap-grad-reduce", "--overlap-param-gather"),
    ],
    "zero2": ["--data-parallel-sharding-strategy", "optim_grads"],
    "fsdp": ["--data-parallel-sharding-strategy", "optim_grads_params"],
    "dp2": ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
}


def write_tokens(folder: Path, shape: Shape, samples: int) -> Path:
    """A pair of token files with so many samples, documents of 1,000 tokens."""
    prefix = folder / f"random_{shape.vocab}_{samples * shape.seq}"
    if prefix.with_suffix(".idx").exists():
        return prefix
    random = np.random.default_rng(1)
    dtype = np.uint16 if shape.vocab < 65500 else np.int32
    with prefix.with_suffix(".bin").open("wb") as out, prefix.with_suffix(".idx").open("wb") as idx:
        writer = IndexedWriter(out, dtype)
        for _ in range(samples * shape.seq // 1000 + 2):
            writer.add_document([random.integers(0, shape.vocab - 1, 1000).astype(dtype)])
        writer.write_index(idx)
    return prefix


def batch_size(shape: Shape, layout: str, gpus: int, accumulate: int) -> int:
    """Samples of a step."""
    shards = 2 if layout in ("tp2", "pp2", "cp2") else 1
    return shape.mbs * accumulate * gpus // shards


def profile_flags(save: Path) -> tuple[list[str], Path]:
    """(flags of the stage that profile the steps after the timed ones, the trace of rank 0)."""
    first, last = STEPS + WARMUP, STEPS + WARMUP + PROFILED
    # One step more, since the last ends with a save.
    flags = ["--train-iters", str(last + 1), "--profile", "--use-pytorch-profiler"]
    flags += ["--profile-step-start", str(first), "--profile-step-end", str(last)]
    return flags, save / "logs" / f"profile-rank0000-steps-{first + 1}-{last}.json.gz"


def command(
    shape: Shape, layout: str, gpus: int, accumulate: int, prefix: Path, save: Path
) -> list[str]:
    """The stage's command line."""
    options = {
        "nproc-per-node": gpus,
        "global-batch-size": batch_size(shape, layout, gpus, accumulate),
        "train-iters": STEPS + WARMUP,
        "eval-iters": 0,
        "lr": 1e-4,
        "log-interval": 10,
        "data-path": prefix,
        "split": "100,0,0",
        "num-workers": 2,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": shape.vocab - 1,
        "save": save,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    flags = ["--bf16", "--log-throughput", "--no-save-optim", *shape.flags(), *LAYOUTS[layout]]
    return [sys.executable, "-m", "stages.pretrain", *words, *flags]


def planned_bytes(shape: Shape, layout: str, gpus: int, accumulate: int, extra: list[str]) -> float:
    """The peak that `stages.plan` says; NaN where it does not count tensors."""
    sizes = [
        "--world-size",
        gpus,
        "--global-batch-size",
        batch_size(shape, layout, gpus, accumulate),
    ]
    words = [*map(str, sizes), "--tokenizer-type", "NullTokenizer", "--bf16", "--json"]
    words += ["--vocab-size", str(shape.vocab - 1), *shape.flags(), *LAYOUTS[layout], *extra]
    done = subprocess.run(
        [sys.executable, "-m", "stages.plan", *words], capture_output=True, text=True, check=True
    )
    detail = json.loads(done.stdout)["memory_detail_bytes"]
    return float(detail["total"]) if detail else math.nan


def measure_stage(
    words: list[str], save: Path, shape: Shape, gpus: int, planned: float
) -> dict[str, float]:
    """Medians of one run of the stage, per GPU. planned: bytes, for their share of the peak."""
    drawn, said, seen = {}, [], 0.0
    begun = time.monotonic()
    state: Future[dict[str, float]] | None = None
    # The question takes longer than some steps, and lines must be read as they come.
    with (
        ThreadPoolExecutor(1) as asked,
        subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if logged := LOGGED.search(line):
                drawn[int(logged[1])] = joules()
                seen = seen or time.monotonic() - begun
                if int(logged[1]) == STEPS:  # within the timed steps
                    state = asked.submit(gpu_state)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)}\n{''.join(said)[-4000:]}")
    lines = [json.loads(line) for line in (save / "timings.jsonl").read_text().splitlines()]
    steady = [line for line in lines if WARMUP < line["step"] <= STEPS + WARMUP]
    rate = statistics.median(line["tokens_per_second"] for line in steady) / gpus
    tokens = statistics.median(line["tokens_per_second"] * line["ms"] / 1e3 for line in steady)
    # A run that had ended before logs nothing: its timings are there, its energy is not.
    begin, end = (drawn.get(step, math.nan) for step in (WARMUP, STEPS + WARMUP))
    peak = max(line["memory_bytes"] for line in steady)
    before = sum(line["ms"] for line in lines if 1 < line["step"] <= min(drawn, default=0)) / 1e3
    return {
        "tokens_per_second": rate,
        "mfu": share_of_peak(shape, rate),
        "gigabytes": peak / 1e9,
        "first_step_seconds": seen - before if seen else math.nan,
        "planned_over_peak": planned / peak,
        "joules_per_token": (end - begin) / (STEPS * tokens / gpus),
        **(state.result() if state else {}),
    }


def profiled(trace: Path) -> tuple[KernelTable, str]:
    """(the table of a trace, its text); both are also written beside it."""
    table = kernel_table(read_trace(trace))
    text = f"{markdown(table)}\n\nTrace: {trace}"
    trace.with_name("kernels.md").write_text(f"{text}\n")
    trace.with_name("kernels.json").write_text(json.dumps(table.document(), indent=1) + "\n")
    return table, text


def measure_peer(words: list[str]) -> dict[str, float]:
    """A peer in a process of its own."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stderr[-4000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def plain(shape: Shape, accumulate: int) -> list[str]:
    """The command of the plain loop."""
    words = [sys.executable, "-m", "benchmarks.plain_torch", shape.name]
    return [*words, "--accumulate", str(accumulate)]


def megatron(
    shape: Shape, layout: str, gpus: int, accumulate: int, fp8: list[str]
) -> list[str] | None:
    """The command of Megatron-Core; None where it cannot run this."""
    is_there = all(map(importlib.util.find_spec, ("megatron", "transformer_engine")))
    if not is_there or shape.state or layout not in megatron_peer.LAYOUTS:
        return None
    run = [sys.executable, "-m"]
    if gpus > 1:
        run += ["torch.distributed.run", "--nproc-per-node", str(gpus), "-m"]
    words = [*run, "benchmarks.megatron_peer", shape.name, "--layout", layout]
    return [*words, "--accumulate", str(accumulate), *fp8]


def cells(figures: dict[str, float]) -> str:
    """As the table shows them."""
    planned = figures.get("planned_over_peak", math.nan)
    plan = "" if math.isnan(planned) else f" (plan {100 * planned:.1f} %)"
    first = figures.get("first_step_seconds", math.nan)
    started = "" if math.isnan(first) else f", first step after {first:.0f} s"
    return (
        f"{figures['tokens_per_second']:,.0f} tok/s, {100 * figures['mfu']:.1f} %, "
        f"{figures['gigabytes']:.1f} GB{plan}, {1e3 * figures['joules_per_token']:.2f} mJ"
        f"{started}"
    )


def measure_ours(
    shape: Shape, args: argparse.Namespace, folder: Path, extra: list[str]
) -> tuple[dict[str, float], Path | None]:
    """(figures of the stage, its trace with --profile)."""
    layout, gpus, accumulate = args.layout, args.gpus, args.accumulate
    batch = shape.mbs * accumulate * gpus
    prefix = write_tokens(folder, shape, batch * (STEPS + WARMUP + PROFILED + 2))
    kind = "profile" if args.profile else "run"
    save = folder / f"{kind}-{shape.name}-{layout or 'one'}-{accumulate}"
    words = command(shape, layout, gpus, accumulate, prefix, save) + extra
    flags, trace = profile_flags(save)
    if args.profile:
        words += flags
    planned = planned_bytes(shape, layout, gpus, accumulate, extra)
    ours = measure_stage(words, save, shape, gpus, planned)
    return ours, trace if args.profile else None


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    known = [name for name in SHAPES if name != "tiny"]
    parser.add_argument("shapes", nargs="*", help=f"of {', '.join(SHAPES)}; unset: {known}")
    parser.add_argument("--layout", choices=LAYOUTS, default="")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--peers", choices=("all", "plain", "megatron", "none"), default="all")
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--profile", action="store_true", help="a table of kernels, and a trace")
    parser.add_argument("--json", type=Path, help="file for figures and what they depend on")
    parser.add_argument("--fp8-format", choices=("e4m3", "hybrid"))
    parser.add_argument("--fp8-recipe", default="tensorwise")
    args, extra = parser.parse_known_args()
    fp8: list[str] = []
    if args.fp8_format:
        fp8 = ["--fp8-format", args.fp8_format, "--fp8-recipe", args.fp8_recipe]
    folder = args.scratch or Path(tempfile.mkdtemp(prefix="trainyard-train-"))
    folder.mkdir(parents=True, exist_ok=True)
    record, tables = Record(args.json), []
    print("| shape | layout | trainyard, per GPU | plain torch loop | Megatron-Core |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    layout = f"{args.layout or 'one'} x{args.gpus} ga{args.accumulate}"
    for name in args.shapes or known:
        shape = SHAPES[name]
        case = {"shape": name, "layout": layout, "options": fp8}
        no_plain = shape.experts or shape.state or fp8
        commands = {
            "plain": None if no_plain else plain(shape, args.accumulate),
            "megatron": megatron(shape, args.layout, args.gpus, args.accumulate, fp8),
        }
        peers: list[dict[str, float] | None] = []
        for peer, words in commands.items():
            found = measure_peer(words) if words and args.peers in ("all", peer) else None
            peers.append(found)
            if found is not None:
                record.add(f"{PEERS[peer]} {name}", cells(found), {**case, **found})
        ours, trace = measure_ours(shape, args, folder, extra + fp8)
        case["options"] = [*extra, *fp8]
        record.add(f"ours {name}", cells(ours), {**case, **ours})
        if trace is not None:
            table, text = profiled(trace)
            tables.append(f"## {name}, {layout}\n\n{text}\n")
            kept = {**case, "trace": str(trace), "kernels": table.document()}
            record.add(f"profile {name}", str(trace.with_name("kernels.md")), kept)
        rate = ours["tokens_per_second"]
        beside = [
            "" if peer is None else f"{cells(peer)}: {rate / peer['tokens_per_second']:.2f}x"
            for peer in peers
        ]
        print(f"| {name} | {layout} | {cells(ours)} | {' | '.join(beside)} |", flush=True)
    for text in tables:
        print(f"\n{text}")


if __name__ == "__main__":
    main()
