"""Builds the callbacks of a run: loggers, timers, hang and memory watches. None of them changes
the result of the run."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from trainyard.artifacts import store
from trainyard.config import to_dict
from trainyard.models.family import FlopConvention
from trainyard.models.parallel_layout import ParallelLayout
from trainyard.parallel.device import check_memory, device_name
from trainyard.parallel.groups import ProcessGroups, broadcast_object, gather_objects
from trainyard.training.logging.loggers import Guarded, build_loggers
from trainyard.training.logging.progress import Progress
from trainyard.training.logging.run_info import RunInfo
from trainyard.training.logging.scalars import memory_scalars
from trainyard.training.logging.summary_files import SummaryFiles
from trainyard.training.logging.timer_report import TimerReport
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.length import RunLength
from trainyard.training.loop.rerun import RerunMachine, SpikeDetector, StepJudge, Suspicion
from trainyard.training.loop.step import TrainModule
from trainyard.training.loop.throughput import DataWait
from trainyard.training.loop.timers import COMPUTE, Timers
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.run.run_folder import RunFolder
from trainyard.training.run_host import RunHost
from trainyard.training.watch.garbage_collection import GarbageCollection
from trainyard.training.watch.hang import HangWatch
from trainyard.training.watch.memory import (
    MemoryPlan,
    out_of_memory_explained,
    parallel_layout_of,
    plan_memory,
)
from trainyard.training.watch.memory_monitor import MemoryMonitor
from trainyard.training.watch.profile import build_profiles
from trainyard.training.watch.rank_mailbox import open_mailbox
from trainyard.training.watch.replicas import ReplicaCheck
from trainyard.training.watch.spike_warning import SpikeWarning

log = logging.getLogger(__name__)

SUSPICION = "suspicion"
"""Key of a remembered document: the step at which an earlier run ended, for a rerun on other
machines."""


class RunCallbacks:
    """The callbacks of a run and what they share. Built before the train module, which takes
    `timers` and `judge`."""

    def __init__(
        self,
        config: PretrainConfig,
        host: RunHost,
        folder: RunFolder | None,
        groups: ProcessGroups,
        device: torch.device,
        length: RunLength,
        vocab_size: int,
        is_built_in: bool,
        flops: FlopConvention,
    ) -> None:
        self._config, self._folder, self._groups = config, folder, groups
        self._device, self._length = device, length
        self._vocab_size, self._is_built_in = vocab_size, is_built_in
        self._logs_folder = logs_folder(config.save)
        self.info = RunInfo(
            steps=length.steps,
            samples=length.samples,
            tokens_per_sample=config.model.seq_length,
            rank=groups.rank,
            world_size=groups.dims.world_size,
            device_name=device_name(device),
            save=config.save or "",
            flops=flops,
            config=to_dict(config),
        )
        self.timers = Timers(
            config.logging.timing_log_level,
            device,
            always=COMPUTE if config.watch.log_straggler else (),
            barrier=self._barrier if config.logging.barrier_with_level_1_timing else _nothing,
        )
        self.judge = self._build_judge()
        self._hang = HangWatch(
            groups.rank,
            groups.dims.world_size,
            open_mailbox(groups.dims.world_size),
            self._logs_folder,
            config.watch.hang_timeout_minutes,
            end=host.end_process,
        )
        self._profiles = build_profiles(
            config.profiling, groups.rank, device, self._logs_folder, config.save
        )
        self._timer_report = self._build_timer_report()
        self.wait = DataWait(self._hang.beat)
        self.summary_files = SummaryFiles(
            self.info,
            folder,
            groups,
            device,
            self._logs_folder,
            plan=lambda: self.plan()[0],
            timers=lambda: self._timer_report.last,
            is_wanted=config.logging.save_performance_summary,
        )

    def build(
        self, train_module: TrainModule, timings: Callback, checkpointing: Callback
    ) -> list[Callback]:
        """All callbacks, in the order in which the loop calls them."""
        logged, watch, training = self._config.logging, self._config.watch, self._config.training
        found: list[Callback] = [self._hang]
        if training.manual_gc:
            found.append(GarbageCollection(training.manual_gc_interval, training.save_interval))
        if logged.monitor_memory_continuously:
            path = self._logs_folder / f"memory-rank{self._groups.rank:04d}.jsonl"
            found.append(MemoryMonitor(path, self._device, logged.memory_monitor_interval))
        if self._groups.rank == 0:
            found.append(SpikeWarning())
            if logged.log_memory_to_tensorboard:
                found.append(_MemoryGauges(self._device, self.info.gauges))
        if self.timers.is_on:
            found.append(self._timer_report)
        found += build_loggers(logged, self.info) if self._groups.rank == 0 else []
        interval = watch.check_weight_hash_across_dp_replicas_interval
        if interval is not None:
            found.append(ReplicaCheck(train_module, self._groups, interval))
        found += [timings, checkpointing, *self._profiles]
        if logged.log_progress and self._groups.rank == 0:
            path = self._logs_folder.parent / "progress.txt"
            progress = Progress(path, self.info, training.save_interval)
            found.append(Guarded("progress", progress))
        return found

    def _build_timer_report(self) -> TimerReport:
        logged, watch = self._config.logging, self._config.watch
        return TimerReport(
            self.timers,
            self._groups.world,
            self._groups.rank,
            logged.log_interval,
            option=logged.timing_log_option,
            show_timers=logged.timing_log_level > 0,
            num_stragglers=watch.straggler_minmax_count if watch.log_straggler else 0,
            gauges=self.info.gauges if logged.log_timers_to_tensorboard else None,
        )

    def _barrier(self) -> None:
        if self._groups.world is not None:
            dist.barrier(self._groups.world)

    # --- reruns of steps ------------------------------------------------------------------------

    def _build_judge(self) -> StepJudge | None:
        watch, rank = self._config.watch, self._groups.rank
        if watch.rerun_mode == "disabled":
            return None
        if watch.rerun_mode == "report_determinism_stats":
            return StepJudge(None, is_first_rank=rank == 0)
        where = gather_objects(f"{socket.gethostname()}/{self._device}", self._groups.world)
        kept = self._folder.remembered(SUSPICION) if self._folder is not None else None
        kept = broadcast_object(kept, self._groups.world)
        suspicion = Suspicion.of_document(kept) if kept else None
        spikes = SpikeDetector() if watch.check_for_spiky_loss else None
        return StepJudge(RerunMachine(where, suspicion), spikes, self._store_suspicion, rank == 0)

    def _store_suspicion(self, suspicion: Suspicion | None) -> None:
        if self._folder is not None:
            document = suspicion.document() if suspicion is not None else {}
            self._folder.remember(SUSPICION, document)

    # --- memory -------------------------------------------------------------------------------

    def plan(self) -> tuple[MemoryPlan | None, ParallelLayout]:
        """The memory that a rank should need and the layout behind it; None for a user's model."""
        config, dims = self._config, self._groups.dims
        micro, count = config.training.micro_batch_size, self._length.batch_size_schedule.final
        layout = parallel_layout_of(
            *(config.model, config.parallel, dims, micro, count.num_microbatches),
            offloaded=config.optimizer.offloaded,
        )
        if not self._is_built_in:
            return None, layout
        kind = config.optimizer.optimizer
        return plan_memory(config.model, self._vocab_size, layout, config.precision, kind), layout

    def check_memory(self) -> None:
        """Refuse a model whose weights and gradients alone exceed the memory of the device."""
        plan, _ = self.plan()
        if plan is not None:
            count = self._config.model.num_params(self._vocab_size)
            check_memory(
                f"the weights and gradients of {count:,} parameters (--num-layers, --hidden-size, "
                "the vocabulary) take on the most loaded rank",
                plan.parameters + plan.gradients,
                self._device,
                "choose a smaller model, or shard it over more ranks with "
                "--tensor-model-parallel-size or --pipeline-model-parallel-size",
            )

    @contextmanager
    def explaining_memory(self) -> Iterator[None]:
        """Explain out-of-memory errors in this context, with remedies."""
        rank, world_size = self._groups.rank, self._groups.dims.world_size
        with out_of_memory_explained(rank, world_size, self._device, self.plan):
            yield

    def log_memory_plan(self) -> None:
        """Log the memory that a rank should need."""
        plan, _ = self.plan()
        if self._groups.rank == 0 and plan is not None:
            for line in plan.lines():
                log.info("%s", line)

    def log_determinism(self) -> None:
        """Log the result of --rerun-mode report_determinism_stats."""
        if self._groups.rank == 0 and self.judge is not None and self.judge.machine is None:
            log.info("%s", self.judge.report())


class _MemoryGauges(Callback):
    """The memory of rank 0's device, for loggers."""

    def __init__(self, device: torch.device, gauges: dict[str, float]) -> None:
        self._device = device
        self._gauges = gauges

    def after_step(self, event: StepEvent) -> None:
        """Read the memory."""
        self._gauges.update({s.tag: s.value for s in memory_scalars(self._device)})


def logs_folder(save: str | None) -> Path:
    """Folder for files that only this machine needs: in the run folder if that is local."""
    local = None if save is None else store.local_path(save)
    return Path("trainyard-logs") if local is None else local / "logs"


def _nothing() -> None:
    """No barrier before a timed part."""
