"""How long a save blocks training on a GPU, beside the bare copy of its bytes.

    python -m benchmarks.async_save gpt-345m gpt-1.3b --scratch /fast/disk
    python -m benchmarks.async_save gpt-345m --synchronous --scratch /fast/disk

Each row is one run of `stages.pretrain --async-save` over random token files, with an optimizer
(fp32 weights and both moments: 12 bytes a parameter), saving several times while it trains; what
its saves.jsonl says of every save but the last, which ends the run and is waited for. The peer is
one page-locked buffer of as many bytes filled from the same GPU by one cudaMemcpy, in a process of
its own after it; with --synchronous, which saves with --no-async-save, it is also written by 4
threads to one file in the same folder, and synced."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.shapes import SHAPES, Shape
from benchmarks.train import write_tokens

SAVES = 3
COPY = """
import os, statistics, sys, time, torch
from concurrent.futures import ThreadPoolExecutor
size, path = int(sys.argv[1]), sys.argv[2]
source = torch.empty(size, dtype=torch.uint8, device="cuda")
target = torch.empty(size, dtype=torch.uint8, pin_memory=True)
times = []
for _ in range(6):
    torch.cuda.synchronize()
    began = time.perf_counter()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    if path:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        parts = range(0, size, 1 << 26)
        data = memoryview(target.numpy())
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda at: os.pwrite(file, data[at : at + (1 << 26)], at), parts))
        os.fsync(file)
        os.close(file)
    times.append(time.perf_counter() - began)
print(statistics.median(times[1:]))
"""


def run(shape: Shape, interval: int, folder: Path, *, waits: bool) -> list[dict[str, float]]:
    """The lines of saves.jsonl, in order; the first pages of memory are part of no line.

    waits: training stands still until a save is whole."""
    steps = interval * SAVES + interval // 2
    prefix = write_tokens(folder, shape, shape.mbs * (steps + 1))
    save = folder / f"saves-{shape.name}-{'sync' if waits else 'async'}"
    options = {
        "global-batch-size": shape.mbs,
        "train-iters": steps,
        "eval-iters": 0,
        "lr": 1e-4,
        "log-interval": interval,
        "data-path": prefix,
        "split": "100,0,0",
        "tokenizer-type": "NullTokenizer",
        "vocab-size": shape.vocab - 1,
        "save": save,
        "save-interval": interval,
        "save-retain-interval": 10 * steps,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [
        sys.executable,
        "-m",
        "stages.pretrain",
        *words,
        "--bf16",
        "--no-async-save" if waits else "--async-save",
    ]
    done = subprocess.run(
        [*command, *shape.flags()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-4000:]}")
    return [json.loads(line) for line in (save / "saves.jsonl").read_text().splitlines()]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("shapes", nargs="+", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--interval", type=int, default=60, help="steps between saves")
    parser.add_argument("--synchronous", action="store_true", help="with --no-async-save")
    parser.add_argument("--scratch", type=Path)
    args = parser.parse_args()
    folder = args.scratch or Path(tempfile.mkdtemp(prefix="trainyard-async-"))
    folder.mkdir(parents=True, exist_ok=True)
    print("| shape | bytes | blocked | bare copy | times | durable after |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in args.shapes:
        lines = run(SHAPES[name], args.interval, folder, waits=args.synchronous)[:SAVES]
        size = int(lines[0]["bytes"])
        target = str(folder / "copy.bin") if args.synchronous else ""
        words = [sys.executable, "-c", COPY, str(size), target]
        bare = float(subprocess.check_output(words, text=True))
        blocked = [line["blocked_seconds"] for line in lines]
        durable = statistics.median(line["durable_seconds"] for line in lines)
        print(
            f"| {name} | {size / 1e9:.2f} GB | {', '.join(f'{s:.3f}' for s in blocked)} s "
            f"| {bare:.3f} s, {size / bare / 1e9:.1f} GB/s "
            f"| {statistics.median(blocked) / bare:.2f} | {durable:.1f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()
