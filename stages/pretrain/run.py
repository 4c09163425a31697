"""Build what the options name, find out where to begin, train, and list what was written."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import torch

from stages.context import StageRun
from stages.pretrain.config import PretrainConfig
from stages.pretrain.documents import config_document, losses_of, state_facts
from stages.pretrain.folder import RunKeeper
from stages.pretrain.origin import check_samples_left, check_tokenizer, refuse_other_options
from trainyard.checkpoint.load import open_checkpoint
from trainyard.datasets.form import sample_format
from trainyard.errors import ConfigError, Stopped
from trainyard.models.flops import flops_per_iteration
from trainyard.models.init import init_parameters
from trainyard.optim.schedule import Schedule, build_schedule
from trainyard.parallel.device import resolve_device
from trainyard.parallel.groups import (
    ProcessGroups,
    broadcast_object,
    process_groups,
    rank_of_environment,
)
from trainyard.tokenizers.base import Tokenizer
from trainyard.tokenizers.registry import build_tokenizer
from trainyard.training.build import (
    build_trainee,
    gpt_layout,
    gpt_provider,
    parameter_count,
)
from trainyard.training.callbacks.base import Callback
from trainyard.training.callbacks.checkpointing import Checkpointing, RunFolder
from trainyard.training.callbacks.console import Console
from trainyard.training.callbacks.timings import Timings
from trainyard.training.compiled import should_compile
from trainyard.training.data import RunData, build_run_data
from trainyard.training.ledger import Ledger, parse_ledger
from trainyard.training.length import length_of
from trainyard.training.loop import Outcome, TrainLoop
from trainyard.training.metrics import Workload, summary
from trainyard.training.randomness import seed_process, use_deterministic_algorithms
from trainyard.training.resume import (
    FoundSteps,
    restore_training,
    restore_weights,
    resume,
)
from trainyard.training.spans import Span, spans_of_step
from trainyard.training.state import TrainState
from trainyard.training.step import StepOptions, Trainee

log = logging.getLogger(__name__)


def run(config: PretrainConfig, stage: StageRun) -> dict[str, Any]:
    """Train this rank's share; returns metrics."""
    _, _, local_rank, local_ranks = rank_of_environment()
    device = resolve_device(config.training.device, local_rank)
    _prepare_torch(config, local_ranks)
    with process_groups(config.parallel, device) as groups:
        return _Pretraining(config, stage, groups, device).run()


def _prepare_torch(config: PretrainConfig, local_ranks: int) -> None:
    threads = config.training.num_threads
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, len(os.sched_getaffinity(0)) // local_ranks)
    if threads is not None:
        torch.set_num_threads(threads)
    seed_process(config.training.seed)
    if config.training.deterministic_mode:
        use_deterministic_algorithms()


class _Pretraining:
    """One run on one rank."""

    def __init__(
        self, config: PretrainConfig, stage: StageRun, groups: ProcessGroups, device: torch.device
    ) -> None:
        self.config, self.stage, self.groups, self.device = config, stage, groups, device
        training = config.training
        self.length = length_of(training, groups.dims.dp, config.model.seq_length)
        self.schedule: Schedule = build_schedule(
            config.optimizer,
            training.train_iters,
            self.length.global_batch_size,
            training.train_samples,
        )
        self.tokenizer: Tokenizer = build_tokenizer(config.tokenizer)
        self.vocab_size = config.model.padded_vocab_size(
            self.tokenizer.vocab_size, groups.dims.tp
        )
        self.data = self._build_data()
        self.keeper = RunKeeper(stage) if groups.rank == 0 else None
        # One rank looks: on a store that lags, two could see different steps.
        self.found = broadcast_object(self.keeper.found if self.keeper else FoundSteps(), groups.world)

    def run(self) -> dict[str, Any]:
        """Train from where the run is to its end, and list its files."""
        trainee = self._build_trainee()
        state, ledger = self._begin(trainee)
        training, keeper = self.config.training, self.keeper
        timings = Timings(
            training.save_interval or self.length.steps, keeper.keep_timings if keeper else _drop
        )
        callbacks: list[Callback] = [timings, self._checkpointing(trainee)]
        if keeper is not None:
            logged = self.config.logging
            console = Console(self.length.steps, logged.log_interval, logged.log_throughput)
            callbacks.insert(0, console)
        loop = TrainLoop(
            trainee,
            self.schedule,
            self.data,
            training,
            self.length,
            self._workload(),
            callbacks=callbacks,
            state=state,
            ledger=ledger,
            stop_requested=lambda: self.stage.stop_requested,
        )
        self.stage.defer_signals()
        outcome = loop.run()
        if outcome != "finished":
            self._stop(outcome, loop.state)
        lines = parse_ledger(keeper.finish()) if keeper is not None else []
        return {
            "parameters": self.config.model.num_params(self.vocab_size),
            **losses_of(lines),
            **summary(timings.timings),
            "device": self._device_name(),
            "ranks": self.groups.dims.world_size,
            "threads": torch.get_num_threads(),
        }

    # --- building ---------------------------------------------------------------------------

    def _build_data(self) -> RunData:
        data, training = self.config.data, self.config.training
        length = self.config.model.seq_length
        form = sample_format(data, self.tokenizer, length, training.seed)
        return build_run_data(data, training, form, self.length, self.groups.dp_rank)

    def _build_trainee(self) -> Trainee:
        config, training = self.config, self.config.training
        data = config.data
        return build_trainee(
            gpt_provider(config.model, self.vocab_size),
            gpt_layout(config.model, training.micro_batch_size),
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
            ),
            own_positions=data.reset_position_ids or data.dataloader_inter_document_masking,
            compile_layers=should_compile(training.compile_layers, self.device),
        )

    def _workload(self) -> Workload:
        flops = flops_per_iteration(self.config.model, self.vocab_size, 1)
        return Workload(self.config.model.seq_length, flops, self.groups.dims.world_size)

    # --- where to begin ---------------------------------------------------------------------

    def _begin(self, trainee: Trainee) -> tuple[TrainState, Ledger]:
        step = self.found.latest
        if step is not None:
            return resume(self.config.save, step, trainee, self.length.global_batch_size)
        refuse_other_options(self.config, self.found)
        load = self.config.foreign_load()
        if load is None:
            for chunk in trainee.chunks:
                init_parameters(chunk, self.config.training.seed)
            trainee.optimizer.adopt_model_parameters()
            self._log_start(trainee, "initial weights from --seed")
            return TrainState(), Ledger()
        state = TrainState()
        with open_checkpoint(load, "--load") as checkpoint:
            check_tokenizer(checkpoint, self.tokenizer, self.config.finetune)
            if self.config.finetune:
                restore_weights(checkpoint, trainee)
                trainee.optimizer.adopt_model_parameters()
            else:
                state = restore_training(checkpoint, trainee)
                state.unmeasured = {}  # that measurement is the other run's
            self._log_start(trainee, f"step {checkpoint.step} of {checkpoint.url}")
        if state.step >= self.length.steps:
            raise ConfigError(
                f"--load {load} is at step {state.step} and this run has {self.length.steps} "
                "(--train-iters, --train-samples): nothing is left to train; raise it, or use "
                "--finetune"
            )
        check_samples_left(self.config, state, self.length, len(self.data.train))
        return state, Ledger(state.ledger_digest)

    def _log_start(self, trainee: Trainee, origin: str) -> None:
        if self.groups.rank == 0:
            count = self.config.model.num_params(self.vocab_size)
            log.info(
                "training parameters=%d of_this_rank=%d device=%s ranks=%d threads=%d from %s",
                *(count, parameter_count(trainee), self._device_name(), self.groups.dims.world_size),
                *(torch.get_num_threads(), origin),
            )
            valid = "+".join(str(len(dataset)) for _, dataset in self.data.valid) or "0"
            log.info("data train_samples=%d valid_samples=%s", len(self.data.train), valid)

    def _device_name(self) -> str:
        cuda = self.device.type == "cuda"
        return torch.cuda.get_device_name(self.device) if cuda else "cpu"

    # --- where to end -----------------------------------------------------------------------

    def _checkpointing(self, trainee: Trainee) -> Checkpointing:
        folder = RunFolder(
            url=self.config.save,
            lineage=self.stage.lineage,
            stage_name=self.stage.name,
            documents={
                "config.json": config_document(
                    self.config, self.stage.inputs, self.tokenizer.vocab_size, self.vocab_size
                )
            },
            files={f"tokenizer/{name}": data for name, data in self.tokenizer.files().items()},
        )
        return Checkpointing(
            folder,
            trainee,
            self.config.training.save_interval,
            micro_batch_size=self.config.training.micro_batch_size,
            save_optimizer=self.config.training.save_optim,
            facts=state_facts(self.config, self.length.global_batch_size, self.schedule),
            passing=self.found.passing,
            spans=self._spans(),
            before_first=self.keeper.make_room if self.keeper else _nothing,
        )

    def _spans(self) -> tuple[Span, ...]:
        step = self.found.latest
        if self.groups.rank != 0 or step is None:
            return ()
        return spans_of_step(self.config.save, step)

    def _stop(self, outcome: Outcome, state: TrainState) -> None:
        why = "asked to stop" if outcome == "stopped" else "--exit-interval"
        if self.groups.rank == 0 and state.step == 0:
            log.warning("stopped before the first step (%s); there is nothing to save", why)
        elif self.groups.rank == 0:
            log.warning("saved step %d (%s); the same command continues from it", state.step, why)
        if self.stage.stop_requested:
            self.stage.stop()
        raise Stopped(signal.SIGTERM, "--exit-interval")


def _nothing() -> None:
    """What ranks other than the first do to the run folder."""


def _drop(step: int, lines: list[str]) -> None:
    """What they do with their timings."""
