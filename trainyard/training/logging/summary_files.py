"""What a run leaves of its speed and memory, however it ends: performance.json and the peaks.

A run that was stopped has its ranks still, and they are asked; one that failed can ask nobody, and
each rank tells what it knows by itself. Nothing here replaces the error that a run ends with."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from trainyard.artifacts import store
from trainyard.parallel.device import peak_memory_bytes
from trainyard.parallel.groups import ProcessGroups, gather_objects
from trainyard.training.logging.performance import FILE, FINISHED, performance_document
from trainyard.training.logging.run_info import RunInfo
from trainyard.training.loop.throughput import StepTiming
from trainyard.training.run_protocols import RunFolder
from trainyard.training.watch.memory import MemoryPlan, is_out_of_memory, peak_lines

log = logging.getLogger(__name__)

WORDS = 300
"""Characters of an error that the summary repeats."""


class SummaryFiles:
    """Told once how the run ended, on every rank."""

    def __init__(
        self,
        info: RunInfo,
        keeper: RunFolder | None,
        groups: ProcessGroups,
        device: torch.device,
        folder: Path,
        plan: Callable[[], MemoryPlan | None],
        timers: Callable[[], Sequence[dict[str, float]]],
        is_wanted: bool,
    ) -> None:
        """folder: for what ranks other than the first leave. is_wanted: --save-performance-summary;
        the peaks are told in any case."""
        self._info, self._keeper = info, keeper
        self._groups, self._device = groups, device
        self._folder, self._plan, self._timers = folder, plan, timers
        self._is_wanted = is_wanted

    def finished(self, timings: Sequence[StepTiming]) -> None:
        """After the last step."""
        peaks = self._peaks()
        if self._keeper is not None and self._is_wanted:
            self._keeper.write_volatile(FILE, self._document(timings, peaks, FINISHED))

    def stopped(self, timings: Sequence[StepTiming], why: str) -> None:
        """After a step that is not the last; the same command goes on from it."""
        peaks = self._peaks()
        if self._keeper is not None and self._is_wanted:
            document = self._document(timings, peaks, f"stopped: {why}")
            self._write_unfinished(self._keeper, document)

    def failed(self, timings: Sequence[StepTiming], error: BaseException) -> None:
        """With an error, on this rank at least, which its caller raises again."""
        is_full = is_out_of_memory(error)
        if not is_full and (self._keeper is None or not timings):
            return  # what all ranks see, the first one tells; before a step there is nothing
        try:
            peak = peak_memory_bytes(self._device)
            if self._keeper is not None:
                log.info("%s", peak_lines([peak])[0])
            if not self._is_wanted:
                return
            first = (str(error).strip().splitlines() or [""])[0][:WORDS]
            document = self._document(
                timings, [peak], f"failed: {type(error).__name__}: {first}", self._info.rank
            )
            if self._keeper is not None:
                self._write_unfinished(self._keeper, document)
            else:
                self._write_of_this_rank(document)
        except Exception as other:  # the error that the run ends with is the one to be told
            log.warning("no %s of the failed run: %r", FILE, other)

    def _peaks(self) -> list[int]:
        peaks = gather_objects(peak_memory_bytes(self._device), self._groups.world)
        if self._keeper is not None:
            for line in peak_lines(peaks):
                log.info("%s", line)
        return peaks

    def _document(
        self,
        timings: Sequence[StepTiming],
        peaks: Sequence[int],
        ended: str,
        of_rank: int | None = None,
    ) -> dict[str, Any]:
        plan = self._plan()
        return performance_document(
            timings,
            self._info,
            peaks=peaks,
            planned_bytes=None if plan is None else plan.total,
            timers=self._timers(),
            ended=ended,
            of_rank=of_rank,
        )

    def _write_unfinished(self, keeper: RunFolder, document: dict[str, Any]) -> None:
        if not keeper.write_unfinished(FILE, document):
            log.info("no %s: the folder still holds what a finished run left there", FILE)

    def _write_of_this_rank(self, document: dict[str, Any]) -> None:
        name = f"performance-rank{self._info.rank:04d}.json"
        path = self._folder / name
        store.write_bytes(str(path), (json.dumps(document, indent=1) + "\n").encode())
        log.info("speed and memory up to the failure: %s", path)
