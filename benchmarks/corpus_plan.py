"""How well `plan --corpus` predicts what processes on this machine take.

    python -m benchmarks.corpus_plan --runs 5

One process tokenizes one and five times corpora/corpus_en.jsonl with one worker, and shares of the
latter are joined: `--corpus-measured` has these runs alone. The same plan then predicts ten times
the file with 1, 2 and 4 processes of one worker, in shares that run at the same time and a join.
Runs of all kinds take turns; what differs is the median. Data: see `benchmarks.corpus`."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.corpus import Setting, gpt2, megabytes, stage
from trainyard.machine import available_cores

PROCESSES = (1, 2, 4)
BAR = 0.15
SMALL, MIDDLE, LARGE = 1, 5, 10


def main() -> None:
    """Print a table row for each number of processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        setting = Setting(given.data, Path(scratch), given.runs)
        inputs = {times: _repeated(setting, times) for times in (SMALL, MIDDLE, LARGE)}
        _seconds(setting, inputs[SMALL], 1)  # into the page cache, uncounted
        measured: dict[int, list[float]] = {count: [] for count in PROCESSES}
        predicted: dict[int, list[float]] = {count: [] for count in PROCESSES}
        for _ in range(given.runs):
            folder = _small_runs(setting, inputs)
            for count in PROCESSES:
                measured[count].append(_seconds(setting, inputs[LARGE], count))
                predicted[count].append(_predict(folder, megabytes(inputs[LARGE]) / 1e3, count))
        for count in PROCESSES:
            _report(count, measured[count], predicted[count])


def _repeated(setting: Setting, times: int) -> Path:
    path = setting.scratch / f"corpus_x{times}.jsonl"
    with path.open("wb") as out:
        for _ in range(times):
            out.write(setting.corpus.read_bytes())
    return path


def _command(setting: Setting, corpus: Path, prefix: Path, *more: str) -> list[str]:
    where = ("--input", str(corpus), "--output-prefix", str(prefix))
    return [*stage("stages.tokenize"), *where, *gpt2(setting), "--workers", "1", *more]


def _run_shares(setting: Setting, corpus: Path, prefix: Path, count: int) -> None:
    """Shares at the same time, then their join; one process makes the whole."""
    if count == 1:
        subprocess.run(_command(setting, corpus, prefix), check=True, capture_output=True)
        return
    world = ("--world-size", str(count))
    shares = [
        subprocess.Popen(
            _command(setting, corpus, prefix, *world, "--rank", str(rank)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(count)
    ]
    statuses = [share.wait() for share in shares]
    if any(statuses):
        raise RuntimeError(f"{prefix}: a share failed; run its command alone to see why")
    subprocess.run(_command(setting, corpus, prefix, *world), check=True, capture_output=True)


def _seconds(setting: Setting, corpus: Path, count: int) -> float:
    folder = setting.scratch / "out"
    shutil.rmtree(folder, ignore_errors=True)
    began = time.perf_counter()
    _run_shares(setting, corpus, folder / "corpus", count)
    return time.perf_counter() - began


def _small_runs(setting: Setting, inputs: dict[int, Path]) -> Path:
    """What the plan is told: smaller runs of one process, and joins of two sizes."""
    folder = setting.scratch / "measured"
    shutil.rmtree(folder, ignore_errors=True)
    for times in (SMALL, MIDDLE):
        for count in (1, 2):
            _run_shares(setting, inputs[times], folder / f"x{times}-of-{count}", count)
    return folder


def _predict(measured: Path, gigabytes: float, processes: int) -> float:
    command = stage("stages.plan", "--corpus", "--corpus-gb", f"{gigabytes:.6f}", "--json")
    command += ["--machines", "1", "--processes", str(processes), "--workers", "1"]
    command += ["--cores", str(available_cores()), "--corpus-measured", str(measured)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds: float = json.loads(done.stdout)["forecasts"][0]["seconds"]
    return seconds


def _report(processes: int, measured: list[float], predicted: list[float]) -> None:
    error = statistics.median(predicted) / statistics.median(measured) - 1
    print(
        f"| {processes} processes | {_figure(predicted)} | {_figure(measured)} "
        f"| {100 * error:+.1f} % | {'yes' if abs(error) <= BAR else 'NO'} |",
        flush=True,
    )


def _figure(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f}-{max(seconds):.2f})"


if __name__ == "__main__":
    main()
