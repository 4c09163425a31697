"""Profiles of a few steps (--profile) and of the memory of a device (--record-memory-history).

A rank marks its steps for nsys (`nsys profile --capture-range cudaProfilerApi`), or writes a trace
of torch's profiler. The files are beside the run, and no part of it."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

import torch

from trainyard.errors import ConfigError
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.state import TrainState
from trainyard.training.options.profile import ProfileConfig

log = logging.getLogger(__name__)

MAX_ALLOCATIONS = 100_000
"""Entries of the memory history, as in Megatron-LM: the newest stay."""

PREFIXES = ("profile-", "memory-history-")
"""Of the files, which the run card names."""


def build_profiles(
    config: ProfileConfig, rank: int, device: torch.device, folder: Path
) -> list[Callback]:
    """The profiles of a rank; ConfigError for one that needs a CUDA device and has none."""
    if rank not in config.profile_ranks:
        return []
    is_cuda = device.type == "cuda"
    found: list[Callback] = []
    if config.profile and config.use_pytorch_profiler:
        found.append(StepTrace(config, rank, folder))
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
        found.append(MemoryHistory(folder / f"memory-history-rank{rank:04d}.pickle"))
    return found


class StepWindow(Callback):
    """Profiles from the end of one step to the end of another, or of the run."""

    def __init__(self, config: ProfileConfig) -> None:
        self._first, self._last = config.profile_step_start, config.profile_step_end
        self._is_open = False
        self._range = ExitStack()
        """Of the step that is running."""

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

    def __init__(self, config: ProfileConfig, rank: int, folder: Path) -> None:
        super().__init__(config)
        steps = f"{self._first + 1}-{self._last}"
        self._path = folder / f"profile-rank{rank:04d}-steps-{steps}.json.gz"
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
        log.info("wrote profile path=%s (open it in ui.perfetto.dev)", self._path)


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

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, state: TrainState) -> None:
        """Start recording."""
        torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)

    def end(self) -> None:
        """Write the snapshot."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(self._path))
        torch.cuda.memory._record_memory_history(enabled=None)
        log.info("wrote memory history path=%s (for pytorch.org/memory_viz)", self._path)

    def failed(self) -> None:
        """Write the snapshot: it shows what ran out of memory."""
        self.end()
