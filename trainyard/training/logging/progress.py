"""progress.txt in the run folder: a line at the start and at each checkpoint (--log-progress)."""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path

from trainyard.training.logging.run_info import RunInfo
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.state import TrainState


class Progress(Callback):
    """On rank 0, after the checkpointing callback."""

    def __init__(self, path: Path, info: RunInfo, save_interval: int | None) -> None:
        self._path = path
        self._info = info
        self._save_interval = save_interval
        self._flops = 0.0
        self._began = time.monotonic()

    def begin(self, state: TrainState) -> None:
        """Write the start."""
        self._write(f"Starting job\tIteration: {state.step}\tTokens: {self._tokens(state)}")

    def after_step(self, event: StepEvent) -> None:
        """Write a checkpoint."""
        timing = event.timing
        if timing is not None:
            self._flops += timing.tflops_per_gpu * 1e12 * self._info.world_size * timing.ms / 1e3
        interval = self._save_interval
        at_interval = interval is not None and event.record.step % interval == 0
        if not (at_interval or event.is_last or event.is_stopping):
            return
        seconds = time.monotonic() - self._began
        rate = self._flops / seconds / self._info.world_size / 1e12
        self._write(
            f"Saved checkpoint\tIteration: {event.record.step}\tJob throughput: {rate:.1f} "
            f"TFLOP/s/GPU\tFloating-point operations: {self._flops:.2e}\t"
            f"Tokens: {self._tokens(event.state)}"
        )

    def _tokens(self, state: TrainState) -> str:
        return f"{state.consumed_train_samples * self._info.tokens_per_sample:.2e}"

    def _write(self, message: str) -> None:
        job = os.environ.get("SLURM_JOB_ID", "")
        now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(f"{now}\tJob ID: {job}\t# GPUs: {self._info.world_size}\t{message}\n")
