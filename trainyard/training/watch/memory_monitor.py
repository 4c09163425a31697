"""Records the memory of a rank as JSON lines (--monitor-memory-continuously).

    {"seconds": 12.0, "rss_bytes": 812, "allocated_bytes": 700, "reserved_bytes": 760}

The last two are of the CUDA device and absent on the CPU. A thread takes the samples, so that they
also cover the inside of a step."""

from __future__ import annotations

import json
import logging
import resource
import threading
import time
from pathlib import Path

import torch

from trainyard.training.loop.events import Callback
from trainyard.training.loop.state import TrainState

log = logging.getLogger(__name__)

STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Resident memory of the process; the peak if the system does not report it."""
    try:
        return int(STATM.read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(device: torch.device) -> dict[str, int]:
    """The memory of this rank now."""
    found = {"rss_bytes": resident_bytes()}
    if device.type == "cuda":
        found["allocated_bytes"] = torch.cuda.memory_allocated(device)
        found["reserved_bytes"] = torch.cuda.memory_reserved(device)
    return found


class MemoryMonitor(Callback):
    """Writes while the loop runs. A write error ends the monitor with a warning, not the run."""

    def __init__(self, path: Path, device: torch.device, interval_seconds: float) -> None:
        self._path = path
        self._device = device
        self._interval = interval_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def begin(self, state: TrainState) -> None:
        """Start."""
        self._thread.start()

    def end(self) -> None:
        """Stop, after a last line."""
        self._over.set()
        self._thread.join()

    def failed(self) -> None:
        """Stop, after a last line."""
        if self._thread.is_alive():
            self.end()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                is_over = False
                while not is_over:
                    is_over = self._over.wait(self._interval)
                    seconds = round(time.monotonic() - began, 3)
                    line = {"seconds": seconds, **measure(self._device)}
                    file.write(json.dumps(line) + "\n")
                    file.flush()
        except (OSError, RuntimeError) as error:
            log.warning("memory monitor stopped path=%s: %s", self._path, error)
