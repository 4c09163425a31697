"""Summary of speed and memory at the end of a run: performance.json and peak memory.

After a stop, rank 0 gathers the figures of all ranks. After a failure ranks cannot communicate, and
each reports its own figures. An error in here never replaces the error that ended the run."""

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
from trainyard.training.run.run_folder import RunFolder
from trainyard.training.watch.memory import MemoryPlan, is_out_of_memory, peak_lines

log = logging.getLogger(__name__)

MAX_ERROR_CHARS = 300
"""Characters of an error that the summary repeats."""


class SummaryFiles:
    """Called once at the end of the run, on every rank."""

    def __init__(
        self,
        info: RunInfo,
        folder: RunFolder | None,
        groups: ProcessGroups,
        device: torch.device,
        logs_folder: Path,
        plan: Callable[[], MemoryPlan | None],
        timers: Callable[[], Sequence[dict[str, float]]],
        is_wanted: bool,
    ) -> None:
        """logs_folder: for the files of other ranks than 0. is_wanted: --save-performance-summary;
        the peaks are logged in any case."""
        self._info, self._folder = info, folder
        self._groups, self._device = groups, device
        self._logs_folder, self._plan, self._timers = logs_folder, plan, timers
        self._is_wanted = is_wanted

    def finished(self, timings: Sequence[StepTiming]) -> None:
        """After the last step."""
        peaks = self._peaks()
        if self._folder is not None and self._is_wanted:
            self._folder.write_volatile(FILE, self._document(timings, peaks, FINISHED))

    def stopped(self, timings: Sequence[StepTiming], why: str) -> None:
        """After a step that is not the last; the same command resumes from it."""
        peaks = self._peaks()
        if self._folder is not None and self._is_wanted:
            document = self._document(timings, peaks, f"stopped: {why}")
            self._write_unfinished(self._folder, document)

    def failed(self, timings: Sequence[StepTiming], error: BaseException) -> None:
        """After an error on this rank, which the caller raises again."""
        is_full = is_out_of_memory(error)
        if not is_full and (self._folder is None or not timings):
            return  # rank 0 reports an error of all ranks; nothing is measured before step 1
        try:
            peak = peak_memory_bytes(self._device)
            if self._folder is not None:
                log.info("%s", peak_lines([peak])[0])
            if not self._is_wanted:
                return
            first = (str(error).strip().splitlines() or [""])[0][:MAX_ERROR_CHARS]
            document = self._document(
                timings, [peak], f"failed: {type(error).__name__}: {first}", self._info.rank
            )
            if self._folder is not None:
                self._write_unfinished(self._folder, document)
            else:
                self._write_of_this_rank(document)
        except Exception as other:  # must not hide the error that ended the run
            log.warning("cannot write %s of the failed run: %r", FILE, other)

    def _peaks(self) -> list[int]:
        peaks = gather_objects(peak_memory_bytes(self._device), self._groups.world)
        if self._folder is not None:
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

    def _write_unfinished(self, folder: RunFolder, document: dict[str, Any]) -> None:
        if not folder.write_unfinished(FILE, document):
            log.info("skipped %s: the folder has one of a finished run", FILE)

    def _write_of_this_rank(self, document: dict[str, Any]) -> None:
        name = f"performance-rank{self._info.rank:04d}.json"
        path = self._logs_folder / name
        store.write_bytes(str(path), (json.dumps(document, indent=1) + "\n").encode())
        log.info("saved speed and memory up to the failure path=%s", path)
