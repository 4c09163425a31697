"""The work of the rows of `benchmarks.growth` about finished and resumed runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
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
