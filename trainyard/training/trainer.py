"""A pretraining on one rank: build the model, data and callbacks; resume; train; list the files."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from trainyard.checkpoint.background import SaveReport
from trainyard.models.families import family_of
from trainyard.optim.schedule_resume import optimizer_schedule_document
from trainyard.parallel.groups import ProcessGroups, broadcast_object
from trainyard.parallel.layout_checks import check_group_size
from trainyard.tokenizers.base import Tokenizer
from trainyard.tokenizers.registry import build_tokenizer
from trainyard.training.build_callbacks import RunCallbacks
from trainyard.training.logging.attempts import Attempt
from trainyard.training.logging.performance import Timings
from trainyard.training.loop.build import (
    ModelProvider,
    build_train_module,
    built_in_provider,
    model_sizes,
    parameter_count,
    report_kernels,
    should_compile,
    whole_parameter_count,
)
from trainyard.training.loop.data import RunData, build_run_data, check_whole_sets
from trainyard.training.loop.events import Callback
from trainyard.training.loop.ledger import parse_ledger
from trainyard.training.loop.length import length_of, optimizer_schedule_of
from trainyard.training.loop.loop import Outcome, TrainLoop
from trainyard.training.loop.state import TrainState
from trainyard.training.loop.step import StepOptions, TrainModule, default_forward_step
from trainyard.training.loop.throughput import Workload, summary
from trainyard.training.options.course import course_of
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.overrides import (
    Initialize,
    Overrides,
    initialize_by_name,
    placed,
    provided_data,
)
from trainyard.training.result import ReadLedger, Result
from trainyard.training.run.checkpointing import Checkpointing, SaveTarget
from trainyard.training.run.documents import config_document, losses_of, saves_summary, state_facts
from trainyard.training.run.dp_history import spans_of_step
from trainyard.training.run.node_local import find_non_persistent
from trainyard.training.run.node_local_saving import build_background, build_non_persistent
from trainyard.training.run.run_steps import FoundSteps
from trainyard.training.run.segments import Course, segments_of_step
from trainyard.training.run.start import StartLoader, StartPoint
from trainyard.training.run_host import RunHost
from trainyard.training.start_lines import log_data, log_dropout

log = logging.getLogger(__name__)

T = TypeVar("T")


class Trainer:
    """One run on one rank."""

    def __init__(
        self,
        config: PretrainConfig,
        host: RunHost,
        groups: ProcessGroups,
        device: torch.device,
        overrides: Overrides | None = None,
    ) -> None:
        self.config, self.host, self.groups, self.device = config, host, groups, device
        self.overrides = overrides or Overrides()
        training = config.training
        self.length = length_of(training, groups.dims.dp, config.model.seq_length)
        check_group_size(config.parallel, self.length.batch_size_schedule.final.num_microbatches)
        self.optimizer_schedule = optimizer_schedule_of(config.optimizer, training, self.length)
        self.tokenizer: Tokenizer = build_tokenizer(config.tokenizer)
        self.vocab_size = self._padded_vocab_size()
        is_keeper = groups.rank == 0 and config.save is not None
        self.folder = host.run_folder() if is_keeper else None
        # Rank 0 lists the steps for all: listings of an object store may lag.
        self.found = broadcast_object(
            self.folder.found if self.folder else FoundSteps(), groups.world
        )
        self.non_persistent, self.non_persistent_step = find_non_persistent(
            config, host.lineage, groups, self.found
        )
        self.callbacks = RunCallbacks(
            config,
            host,
            self.folder,
            groups,
            device,
            self.length,
            self.vocab_size,
            self._is_built_in,
            self.overrides.flop_convention(config.model),
        )
        self.callbacks.check_memory()
        keep = self.folder.keep_timings if self.folder else lambda step, lines: None
        self._timings = Timings(training.save_interval or self.length.steps, keep)
        between = config.non_persistent.non_persistent_save_interval
        saves = (training.save_interval, between)
        self._attempt = Attempt(self.folder, groups.dims.world_size, saves)
        self.data = self._build_data()
        check_whole_sets(config, self.data)

    def run(self) -> Result:
        """Train from the newest checkpoint to the end, and list the files."""
        try:
            with self.callbacks.explaining_memory():
                return self._run()
        except Exception as error:
            self.callbacks.summary_files.failed(self._timings.timings, error)
            raise

    def _run(self) -> Result:
        train_module = self._build_train_module()
        self._parameters = (
            self.config.model.num_params(self.vocab_size)
            if self._is_built_in
            else whole_parameter_count(train_module)
        )
        start = self._start(train_module)
        training = self.config.training
        timings = self._timings
        kept = self.config.save is not None
        saving = self._attempt.wrap(self._checkpointing(train_module) if kept else Callback())
        ours = self.callbacks.build(train_module, timings, saving)
        loop = TrainLoop(
            train_module,
            self.optimizer_schedule,
            self.data,
            training,
            self.length,
            self._workload(),
            callbacks=[*ours, *self.overrides.callbacks],
            state=start.state,
            ledger=start.ledger,
            stop_requested=lambda: self.host.stop_requested,
            wait=self.callbacks.wait,
            course=start.course_entry,
        )
        self.host.defer_signals()
        if self.config.skip_train:
            record = loop.measure()
            if record is None:
                return Result("stopped", loop.state, {}, train_module.chunks, "asked to stop")
            found = losses_of([record.document()])
            return Result("finished", loop.state, found, train_module.chunks)
        outcome = loop.run()
        train_module.optimizer.finish_parameters()
        self.callbacks.log_determinism()
        if outcome != "finished":
            why = self._log_stop(outcome, loop.state)
            self.callbacks.summary_files.stopped(timings.timings, why)
            self._attempt.ended(outcome)
            return Result(outcome, loop.state, {}, train_module.chunks, why)
        if self.non_persistent is not None:
            self.non_persistent.remove()
        self.callbacks.summary_files.finished(timings.timings)
        self._attempt.publish()
        read_ledger = self._ledger_reader(loop)
        metrics = {
            "parameters": self._parameters,
            **losses_of(read_ledger()),
            **saves_summary(self.callbacks.info.saves),
            **summary(timings.timings),
            "device": self.callbacks.info.device_name,
            "ranks": self.groups.dims.world_size,
            "threads": torch.get_num_threads(),
        }
        return Result(outcome, loop.state, metrics, train_module.chunks, "", read_ledger)

    def _ledger_reader(self, loop: TrainLoop) -> ReadLedger:
        """Finishes the run folder, if there is one; returns the reader of the whole ledger."""
        if self.folder is not None:
            self.folder.finish()
            return self.folder.ledger
        text = loop.ledger.text() if self.groups.rank == 0 else b""
        return lambda: iter(parse_ledger(text))

    # --- building ---------------------------------------------------------------------------

    @property
    def _is_built_in(self) -> bool:
        return self.overrides.model_provider is None

    def _padded_vocab_size(self) -> int:
        """Rows of the embedding; a user's model pads in its own way."""
        found = self.tokenizer.vocab_size
        if not self._is_built_in and not self.overrides.pads_vocabulary:
            return found
        return self.config.model.padded_vocab_size(found, self.groups.dims.tp)

    def _build_data(self) -> RunData:
        config, dp_rank = self.config, self.groups.dp_rank
        if self.overrides.dataset_provider is not None:
            vocab_size = self.tokenizer.vocab_size if self._is_built_in else None
            provide = self.overrides.dataset_provider
            return provided_data(provide, config, self.length, dp_rank, vocab_size)
        return build_run_data(config, self.tokenizer, self.length, dp_rank)

    def _model_provider(self) -> ModelProvider:
        provide = self.overrides.model_provider
        if provide is not None:
            return placed(provide)
        return built_in_provider(self.config.model, self.vocab_size, self.tokenizer.vocab_size)

    def _build_train_module(self) -> TrainModule:
        config, training = self.config, self.config.training
        family = family_of(config.model)
        compiled = training.compile_layers
        report_kernels(
            config,
            self.groups.model_parallel(config.parallel),
            self.device,
            is_built_in=self._is_built_in,
            say=self.groups.rank == 0,
        )
        return build_train_module(
            self._model_provider(),
            model_sizes(
                config.model,
                training.micro_batch_size * self.overrides.rows_per_sample,
                with_neighbors=not config.sft.sft,
            ),
            config.parallel,
            config.optimizer,
            config.precision,
            self.groups,
            self.device,
            StepOptions(
                seed=training.seed,
                per_token=training.calculate_per_token_loss,
                count_zeros=config.logging.log_num_zeros_in_grad,
                measure_params=config.logging.log_params_norm,
                check_finite=config.watch.check_for_nan_in_loss_and_grad,
                timed=self.callbacks.timers,
                judge=self.callbacks.judge,
                forward=self.overrides.forward_step or default_forward_step,
                more_losses=family.more_losses(config.model) if self._is_built_in else (),
                layer_sums=family.layer_sums(config.model) if self._is_built_in else None,
            ),
            own_positions=config.has_positions or self.overrides.dataset_provider is not None,
            # Only the author of a model knows whether its layers compile.
            compile_layers=should_compile(compiled, self.device)
            and (self._is_built_in or compiled == "on"),
            keeps_gradients=config.precision.keeps_gradients(
                config.optimizer.optimizer,
                num_microbatches=self.length.batch_size_schedule.most_microbatches,
                world_size=self.groups.dims.world_size,
            ),
        )

    def _workload(self) -> Workload:
        length = self.config.model.seq_length
        if self._is_built_in:
            model = self.config.model
            flops = family_of(model).flops_per_iteration(model, self.vocab_size, 1)
        else:
            flops = (self.overrides.flops_per_token or 6.0 * self._parameters) * length
        return Workload(length, flops, self.groups.dims.world_size)

    # --- start ------------------------------------------------------------------------------

    def _start(self, train_module: TrainModule) -> StartPoint:
        loader = StartLoader(
            config=self.config,
            found=self.found,
            optimizer_schedule=self.optimizer_schedule,
            length=self.length,
            num_samples=len(self.data.train),
            tokenizer=self.tokenizer,
            padded_vocab_size=self.vocab_size,
            initialize=self._initialize(),
            input_digests=self.host.input_digests,
            non_persistent_step=self.non_persistent_step,
        )
        began = time.monotonic()
        start = loader.load(train_module)
        if start.state.step > 0 or self.config.load is not None:
            self._attempt.restored(time.monotonic() - began)
        self.optimizer_schedule = start.optimizer_schedule
        self._log_start(train_module, start.origin)
        return start

    def _initialize(self) -> Initialize:
        return self.overrides.initialize or initialize_by_name(self.config.model)

    def _log_start(self, train_module: TrainModule, origin: str) -> None:
        if self.groups.rank == 0:
            log.info(
                "training parameters=%d of_this_rank=%d device=%s ranks=%d threads=%d from %s",
                *(self._parameters, parameter_count(train_module), self.callbacks.info.device_name),
                *(self.groups.dims.world_size, torch.get_num_threads(), origin),
            )
            self.callbacks.log_memory_plan()
            log.info("TFLOP/s count by %s", self.callbacks.info.conventions())
            log_data(self.data)
            if self.folder is None:
                log.warning("no --save: this run keeps nothing, and cannot resume")
            log_dropout(self.config.model.attention_dropout, self.groups.dims)

    # --- saving and stopping ----------------------------------------------------------------

    def _checkpointing(self, train_module: TrainModule) -> Checkpointing:
        document = config_document(
            self.config,
            self.host.input_digests,
            self.tokenizer.vocab_size,
            self.vocab_size,
            self.overrides.identity,
        )
        non_persistent = None
        if self.non_persistent is not None:
            non_persistent = partial(
                build_non_persistent,
                self.config,
                self.groups,
                self.host.lineage,
                self.non_persistent,
                self.device,
            )
        target = SaveTarget(
            url=self.config.run_folder,
            lineage=self.host.lineage,
            stage_name=self.host.name,
            documents={"config.json": document},
            files={f"tokenizer/{name}": data for name, data in self.tokenizer.files().items()},
        )
        return Checkpointing(
            target,
            train_module,
            self.config.training.save_interval,
            retain_interval=self.config.training.save_retain_interval,
            keep_last=self.config.training.save_keep_last,
            micro_batch_size=self.config.training.micro_batch_size,
            save_optimizer=self.config.training.save_optim,
            facts=state_facts(self.config, self.length.global_batch_size, self.optimizer_schedule),
            staying=self.found.staying,
            passing=self.found.passing,
            spans=self._recorded(spans_of_step),
            course=Course(
                course_of(self.config),
                optimizer_schedule_document(self.optimizer_schedule),
                self._recorded(segments_of_step),
            ),
            before_first=self.folder.make_room if self.folder else lambda: None,
            background=build_background(self.config, self.groups, self.device),
            needs_room=self.config.training.async_save is None,
            non_persistent=non_persistent,
            report=self._report,
        )

    def _report(self, report: SaveReport) -> None:
        """Record the cost of a save; on rank 0, from any thread."""
        self.callbacks.info.saves.append(report)
        if self.folder is not None:
            self.folder.keep_save(report)

    def _recorded(self, read: Callable[[str, int], tuple[T, ...]]) -> tuple[T, ...]:
        """What the step to resume from recorded about the steps up to itself."""
        if self.groups.rank != 0:
            return ()
        if (outside := self.non_persistent_step) is not None:
            return read(outside.root_url, outside.found.step)
        step = self.found.latest
        return () if step is None else read(self.config.run_folder, step)

    def _log_stop(self, outcome: Outcome, state: TrainState) -> str:
        """Log and return the reason for the stop."""
        is_timed = self.config.training.exit_duration_in_mins is not None
        other = "--exit-duration-in-mins" if is_timed else "a signal to another rank"
        why = "asked to stop" if self.host.stop_requested else other
        why = why if outcome == "stopped" else "--exit-interval"
        if self.groups.rank == 0 and self.folder is None:
            log.warning("stopped after step %d (%s); without --save it is lost", state.step, why)
        elif self.groups.rank == 0 and state.step == 0:
            log.warning("stopped before the first step (%s); there is nothing to save", why)
        elif self.groups.rank == 0:
            log.warning("saved step %d (%s); the same command resumes from it", state.step, why)
        return why
