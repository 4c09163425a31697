"""All figures of every step as JSON lines in a local file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from trainyard import json_text
from trainyard.training.logging.run_info import NewSaves, RunInfo
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.state import TrainState
from trainyard.training.options.logging import LoggingConfig


class JsonLines(Callback):
    """A line for each step, with its ledger entry and times, flushed when the step ends."""

    def __init__(self, path: Path, info: RunInfo) -> None:
        self._path = path
        self._info = info
        self._file: TextIO | None = None
        self._saves = NewSaves(info)

    def begin(self, state: TrainState) -> None:
        """Open the file. Lines of later steps than the one to resume from are dropped: a killed
        attempt wrote them."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            kept = [line for line in self._path.read_bytes().splitlines() if _until(line, state)]
            whole = self._path.with_name(self._path.name + ".partial")
            whole.write_bytes(b"".join(line + b"\n" for line in kept))
            whole.replace(self._path)
        self._file = self._path.open("a")

    def after_step(self, event: StepEvent) -> None:
        """Write the line of the step."""
        if self._file is None:  # it could not be opened before
            self._file = self._path.open("a")
        self._file.write(json.dumps(figures(event, self._info) | self._new_saves()) + "\n")
        self._file.flush()

    def end(self) -> None:
        """Write the cost of the last saves, and close the file."""
        if self._file is None:
            return
        last = self._new_saves()
        if last:
            self._file.write(json.dumps({"step": last["saves"][-1]["step"], **last}) + "\n")
        self._file.close()

    def _new_saves(self) -> dict[str, Any]:
        """The cost of each save that was completed since the last line, perhaps of an earlier
        step."""
        found = [report.document() for report in self._saves.take()]
        return {"saves": found} if found else {}

    def failed(self) -> None:
        """Close the file."""
        self.end()


def _until(line: bytes, state: TrainState) -> bool:
    """Whether a line is complete, and of a step that the run does not repeat."""
    try:
        return int(json_text.loads(line)["step"]) <= state.step
    except (ValueError, KeyError, TypeError):
        return False


def figures(event: StepEvent, info: RunInfo) -> dict[str, Any]:
    """Results and speed of a step, flat."""
    document = event.record.document()
    timing = event.timing
    if timing is None:
        return document
    document["ms"] = round(timing.ms, 3)
    document["tokens_per_second_per_gpu"] = round(info.tokens_per_second_per_gpu(timing), 1)
    document["tflops_per_gpu"] = round(timing.tflops_per_gpu, 5)
    mfu = info.mfu(timing.tflops_per_gpu)
    if mfu is not None:
        document["mfu"] = round(mfu, 5)
    document["data_wait_ms"] = round(timing.data_wait_ms, 3)
    document["memory_bytes"] = timing.memory_bytes
    return document


def make(config: LoggingConfig, info: RunInfo) -> Callback | None:
    """The file, if --metrics-jsonl names one."""
    return JsonLines(Path(config.metrics_jsonl), info) if config.metrics_jsonl else None
