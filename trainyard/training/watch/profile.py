"""Profiles of a few steps (--profile) and of the memory of a device (--record-memory-history).

A rank marks its steps for nsys (`nsys profile --capture-range cudaProfilerApi`), or writes a trace
of torch's profiler. The files are in logs/ of the run folder, and no part of the run."""

from __future__ import annotations

import logging
import shutil
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

import torch

from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.errors import ConfigError, TrainyardError
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.state import TrainState
from trainyard.training.options.profile import ProfileConfig

log = logging.getLogger(__name__)

MAX_ALLOCATIONS = 100_000
"""Entries of the memory history, as in Megatron-LM: the newest stay."""


def build_profiles(
    config: ProfileConfig, rank: int, device: torch.device, folder: Path, save: str | None = None
) -> list[Callback]:
    """The profiles of a rank; ConfigError for one that needs a CUDA device and has none.

    folder: where they are written; save: the run folder, to which they are moved from there if it
    is in an object store."""
    if rank not in config.profile_ranks:
        return []
    is_cuda = device.type == "cuda"
    found: list[Callback] = []
    if config.profile and config.use_pytorch_profiler:
        steps = f"{config.profile_step_start + 1}-{config.profile_step_end}"
        path = folder / f"profile-rank{rank:04d}-steps-{steps}.json.gz"
        found.append(StepTrace(config, path, save))
    elif config.profile:
        if not is_cuda:
            raise ConfigError(
                "--profile marks steps for nsys, which needs a CUDA device; give "
                "--use-pytorch-profiler for a trace of the CPU"
            )
        found.append(StepRanges(config))
    if config.record_memory_history:
        if not is_cuda:
            raise ConfigError("--record-memory-history needs a CUDA device; leave it out")
        found.append(MemoryHistory(folder / f"memory-history-rank{rank:04d}.pickle", save))
    return found


def moved(path: Path, save: str | None) -> str:
    """Move a file from this machine to logs/ of a run folder in an object store; its new place.

    An error is logged, and the file stays: it is not worth a training."""
    if save is None or store.local_path(save) is not None:
        return str(path)
    url = join(save, "logs", path.name)
    try:
        with path.open("rb") as file, store.open_output(url) as out:
            shutil.copyfileobj(file, out)
        path.unlink()
    except (OSError, TrainyardError) as error:
        log.warning("%s stays: %s", path, error)
        return str(path)
    return url


class StepWindow(Callback):
    """Profiles from the end of one step to the end of another, or of the run."""

    def __init__(self, config: ProfileConfig) -> None:
        self._first, self._last = config.profile_step_start, config.profile_step_end
        self._is_open = False
        self._range = ExitStack()
        """The range of the running step."""

    def begin(self, state: TrainState) -> None:
        """Start, if the run begins inside the window."""
        if self._first <= state.step < self._last:
            self._open(state.step)

    def after_step(self, event: StepEvent) -> None:
        """Start or stop, or mark the next step."""
        step = event.record.step
        if self._is_open and step >= self._last:
            self.end()
        elif self._is_open and event.timing is not None:
            self._enter(step + 1)
        elif step == self._first and not self._is_open:
            self._open(step)

    def end(self) -> None:
        """Stop, if the run ends inside the window."""
        if self._is_open:
            self._is_open = False
            self._range.close()
            self.stop()

    def failed(self) -> None:
        """Stop: the steps so far may show the cause."""
        self.end()

    def _open(self, step: int) -> None:
        self._is_open = True
        self.start()
        self._enter(step + 1)

    def _enter(self, step: int) -> None:
        self._range.close()
        self._range.enter_context(self.named(f"step {step}"))

    def start(self) -> None:
        """Start the profile."""

    def named(self, name: str) -> AbstractContextManager[object]:
        """A range of that name in the profile."""
        return nullcontext()

    def stop(self) -> None:
        """Stop the profile."""


class StepTrace(StepWindow):
    """A trace of torch's profiler: operations with their shapes, on the CPU and the device."""

    def __init__(self, config: ProfileConfig, path: Path, save: str | None) -> None:
        super().__init__(config)
        self._path, self._save = path, save
        self._profiler = torch.profiler.profile(record_shapes=True)

    def start(self) -> None:
        """Start the profiler."""
        self._profiler.start()

    def named(self, name: str) -> AbstractContextManager[object]:
        """A range of the trace."""
        return torch.profiler.record_function(name)

    def stop(self) -> None:
        """Write the trace."""
        self._profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._path))
        path = moved(self._path, self._save)
        log.info("wrote profile path=%s (open it in ui.perfetto.dev)", path)


class StepRanges(StepWindow):
    """NVTX ranges of each step and operation, between the start and stop of nsys's capture."""

    def __init__(self, config: ProfileConfig) -> None:
        super().__init__(config)
        self._operations = ExitStack()

    def start(self) -> None:
        """Start the capture."""
        torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
        self._operations.enter_context(torch.autograd.profiler.emit_nvtx(record_shapes=True))

    def named(self, name: str) -> AbstractContextManager[object]:
        """An NVTX range."""
        return torch.cuda.nvtx.range(name)

    def stop(self) -> None:
        """Stop the capture."""
        self._operations.close()
        torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStop())


class MemoryHistory(Callback):
    """The allocations on a CUDA device with their stacks, until the run ends or fails."""

    def __init__(self, path: Path, save: str | None) -> None:
        self._path, self._save = path, save

    def begin(self, state: TrainState) -> None:
        """Start recording."""
        torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)

    def end(self) -> None:
        """Write the snapshot."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(self._path))
        torch.cuda.memory._record_memory_history(enabled=None)
        path = moved(self._path, self._save)
        log.info("wrote memory history path=%s (for pytorch.org/memory_viz)", path)

    def failed(self) -> None:
        """Write the snapshot: it shows what ran out of memory."""
        self.end()
