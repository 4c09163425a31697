"""How parts of trainyard grow: processor seconds and peak memory at three sizes, and the exponent.

    python -m benchmarks.growth                     every row, about a quarter of an hour
    python -m benchmarks.growth gc blend --scratch /tmp/growth
    python -m benchmarks.growth blend samples --megatron-helpers FOLDER

An exponent of 1 is linear: time ~ size ** exponent, from the two largest sizes. Each size runs in
a process of its own. What it needs is made ready before the time is taken, yet counts as memory.
Some rows count files or requests instead of seconds.

FOLDER holds Megatron-Core's compiled helpers (`helpers_cpp*.so` of the wheel `megatron-core`, in
`megatron/core/datasets`): rows that have a peer then show its seconds, and check equal bytes."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import growth_cases as cases
from benchmarks import growth_runs as runs
from benchmarks import growth_servers as servers
from benchmarks.measure import run_once


@dataclass(frozen=True, slots=True)
class Row:
    """A part that grows."""

    what: str
    prepare: cases.Prepare
    sizes: tuple[int, int, int]
    peer: cases.Prepare | None = None
    """The same work by Megatron-Core's helpers."""
    unit: str = ""
    """What the work returns, if that is measured and not its processor seconds."""


def _blend_row(datasets: int, kind: str, most: int) -> Row:
    return Row(
        f"blend of {datasets:,} datasets of {kind} weights, n samples, kept in files",
        partial(cases.blend, datasets, kind),
        (most // 100, most // 10, most),
        partial(cases.blend_peer, datasets, kind),
    )


ROWS = {
    "outputs": Row("index of n datasets of a folder", cases.index_outputs, (100, 300, 1000)),
    "inputs": Row("second run of the same", cases.index_again, (100, 300, 1000)),
    "merge": Row("merge of n pairs", cases.merge_pairs, (100, 300, 1000)),
    "requests": Row(
        "inputs of a merge of n pairs in an object store",
        servers.merge_requests,
        (30, 100, 300),
        unit="requests",
    ),
    "virtual": Row("merge --virtual of n pairs", cases.merge_virtual, (100, 300, 1000)),
    "parts": Row(
        "100,000 sequences of a virtual dataset of n pairs", cases.read_virtual, (100, 300, 1000)
    ),
    "new-files": Row("a job of n small files to tokenize", cases.files_first, (30, 100, 300)),
    "files": Row("a job of n files, all tokenized before", cases.files_again, (100, 300, 1000)),
    "document": Row(
        "tokenize of a document of n bytes", cases.one_document, (10**7, 3 * 10**7, 10**8)
    ),
    "flow": Row(
        "prepare-corpus of n small files: flow and Prefect's server",
        servers.prepare_corpus,
        (30, 100, 300),
        unit="CPU s",
    ),
    "refresh": Row("corpus-refresh plans n sources", cases.refresh, (300, 1000, 3000)),
    "gc": Row("gc of a corpus in n parts", cases.collect, (300, 1000, 3000)),
    "run": Row(
        "manifest of a run of n files in 100 steps, read and compared with a listing",
        runs.run_manifest,
        (10_000, 100_000, 1_000_000),
    ),
    "report": Row("card of a run of n steps", runs.report, (10_000, 100_000, 1_000_000)),
    "resume": Row(
        "ledger of n steps in one file, looked at by a run that resumes",
        runs.resume,
        (10_000, 100_000, 1_000_000),
    ),
    "shards": Row("plan of n files of 12,000 tensors", runs.shards, (64, 256, 1024)),
    "reshard": Row(
        "reshard of n layers with optimizer states to core, tp 8", runs.reshard, (25, 50, 100)
    ),
    "load": Row("load plan of n ranks, 8 a replica", runs.load_plan, (100, 1000, 10_000)),
    "load-local": Row(
        "the same of a step on nodes that come back in another order, with optimizer states, 8 a "
        "replica",
        runs.load_local,
        (100, 1000, 10_000),
    ),
    "load-index": Row(
        "index of that step, read by each rank", runs.load_index, (100, 1000, 10_000)
    ),
    "hang": Row("hang report of n ranks", runs.hang, (100, 1000, 10_000)),
    "blend": _blend_row(1000, "uniform", 10**7),
    "blend-even": _blend_row(1000, "even", 10**7),
    "blend-uneven": _blend_row(1000, "uneven", 10**7),
    "blend-300": _blend_row(300, "uneven", 10**7),
    "blend-100": _blend_row(100, "uneven", 10**7),
    "blend-100-even": _blend_row(100, "even", 10**7),
    "blend-40": _blend_row(40, "uneven", 10**7),
    "blend-40-even": _blend_row(40, "even", 10**7),
    "blend-few": _blend_row(10, "uniform", 10**8),
    "blend-five": _blend_row(5, "uniform", 10**7),
    "blend-two": _blend_row(2, "uniform", 10**7),
    "samples": Row(
        "sample bounds of n documents, in a known order",
        cases.samples,
        (1_000_000, 10_000_000, 100_000_000),
        cases.samples_peer,
    ),
    "start": Row(
        "second start of a rank on n documents", cases.start, (1_000_000, 10_000_000, 100_000_000)
    ),
    "step": Row(
        "rank 0's check and digests of a step of n samples of 1,000 datasets, dp 64; 100 steps",
        partial(runs.step, 0),
        (1024, 4096, 16_384),
    ),
    "step-others": Row("the same on another rank", partial(runs.step, 1), (1024, 4096, 16_384)),
    "history": Row(
        "ledger and timings that a training of n steps holds, of which each 1,000th is kept",
        runs.history,
        (3000, 30_000, 300_000),
    ),
    "step-files": Row(
        "files of a step of n ranks on hosts of 8, from the plan",
        runs.step_files,
        (400, 2000, 10_000),
        unit="files",
    ),
}


def main() -> None:
    """Print a table of the chosen rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", choices=[[], *ROWS], help="default: every row")
    parser.add_argument("--scratch", type=Path, help="folder for files; default: a temporary one")
    parser.add_argument("--megatron-helpers", type=Path, help="folder with helpers_cpp*.so")
    parser.add_argument("--one", nargs=2, metavar=("SIZE", "WHO"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        scratch = given.scratch or Path(made)
        scratch.mkdir(parents=True, exist_ok=True)
        if given.one:
            _measure_here(given.rows[0], int(given.one[0]), given.one[1], scratch, given)
            return
        print("| what | sizes | CPU s, or counts | exponent | peak MB | Megatron-Core |")
        print("| --- | --- | --- | --- | --- | --- |")
        for name in given.rows or ROWS:
            print(_line(name, scratch, given.megatron_helpers), flush=True)


def _line(name: str, scratch: Path, helpers: Path | None) -> str:
    row = ROWS[name]
    ours = [_measured(name, size, "ours", scratch, helpers) for size in row.sizes]
    figures, peaks = [one["figure"] for one in ours], [one["peak_mb"] for one in ours]
    peer = ""
    if row.peer is not None and helpers is not None:
        theirs = [_measured(name, size, "peer", scratch, helpers) for size in row.sizes]
        for one, other in zip(ours, theirs, strict=True):
            if one["digest"] != other["digest"]:
                raise RuntimeError(f"{name}: other bytes than Megatron-Core's")
        peer = ", ".join(f"{one['figure']:.2f}" for one in theirs) + " s, "
        peer += f"{theirs[-1]['peak_mb']:.0f} MB, equal bytes"
    sizes = ", ".join(f"{size:,}" for size in row.sizes)
    exponent = math.log(max(figures[2], 1e-6) / max(figures[1], 1e-6))
    exponent /= math.log(row.sizes[2] / row.sizes[1])
    found = ", ".join(f"{one:,}" if isinstance(one, int) else f"{one:.3g}" for one in figures)
    if isinstance(figures[0], int):
        found += f" {row.unit}"
    most = ", ".join(f"{one:.0f}" for one in peaks)
    return f"| {row.what} (`{name}`) | {sizes} | {found} | {exponent:.2f} | {most} | {peer} |"


def _measured(
    name: str, size: int, who: str, scratch: Path, helpers: Path | None
) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.growth", name, "--one", str(size), who]
    command += ["--scratch", str(scratch)]
    command += ["--megatron-helpers", str(helpers)] if helpers else []
    environment = {"OMP_NUM_THREADS": "1", "TRAINYARD_CACHE": str(scratch / "cache")}
    run = run_once(command, environment)
    found: dict[str, Any] = json.loads(run.output.splitlines()[-1])
    return {**found, "peak_mb": run.peak_bytes / 1e6}


def _measure_here(name: str, size: int, who: str, scratch: Path, given: argparse.Namespace) -> None:
    row = ROWS[name]
    if who == "peer":
        sys.path.insert(0, str(given.megatron_helpers))
    prepare = row.prepare if who == "ours" else row.peer
    assert prepare is not None
    seconds, result = _timed(prepare(size, scratch))
    if row.unit:
        print(json.dumps({"figure": result}))
        return
    digest = hashlib.blake2b()
    for array in result or ():
        digest.update(array.data.cast("B"))
    print(json.dumps({"figure": seconds, "digest": digest.hexdigest()}))


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Processor seconds, those of child processes included, and the result."""
    began = cases.cpu_seconds()
    result = work()
    return cases.cpu_seconds() - began, result


if __name__ == "__main__":
    main()
