"""Loads the start of a pretraining: its own newest step, a step of --load, or initial weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainyard.artifacts.urls import join
from trainyard.checkpoint.load import Checkpoint, Restorable, open_checkpoint
from trainyard.checkpoint.node_local.read import open_scattered
from trainyard.checkpoint.steps import step_folder
from trainyard.conversion.detect import detect
from trainyard.conversion.loadable import LoadableSource, open_loadable
from trainyard.conversion.tokenizer_files import Carried
from trainyard.errors import ConfigError
from trainyard.models.families import family_of
from trainyard.optim.build import params_dtype
from trainyard.optim.schedule import OptimizerSchedule
from trainyard.optim.schedule_resume import (
    optimizer_schedule_document,
    resume_optimizer_schedule,
)
from trainyard.tokenizers.base import Tokenizer
from trainyard.training.loop.ledger import Ledger
from trainyard.training.loop.length import RunLength
from trainyard.training.loop.state import TrainState
from trainyard.training.loop.step import TrainModule
from trainyard.training.options.course import course_of
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.overrides import Initialize
from trainyard.training.run.node_local import NonPersistentStep
from trainyard.training.run.repadding import Repadding
from trainyard.training.run.restore import Allowed, restore_training, restore_weights
from trainyard.training.run.resume_checks import (
    check_database,
    check_samples_left,
    check_tokenizer,
    log_repadding,
    refuse_lost_steps,
    repadding_of,
)
from trainyard.training.run.run_steps import FoundSteps, resume
from trainyard.training.run.segments import Course, changes, described, last_course, ledger_entry

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartPoint:
    """The state that the loop starts from, once the weights are loaded."""

    state: TrainState
    ledger: Ledger
    optimizer_schedule: OptimizerSchedule
    origin: str
    """For the log."""
    course_entry: dict[str, Any] | None = None
    """`course` of the next line of the ledger; None if the course does not change there."""


@dataclass(frozen=True, slots=True)
class StartLoader:
    """Finds the start of a run, checks that it fits the options, and loads it."""

    config: PretrainConfig
    found: FoundSteps
    optimizer_schedule: OptimizerSchedule
    """From the options."""
    length: RunLength
    num_samples: int
    """Training samples in the data."""
    tokenizer: Tokenizer
    padded_vocab_size: int
    initialize: Initialize
    """Fills a chunk with initial weights."""
    input_digests: Mapping[str, str] = field(default_factory=dict)
    """Digests of the inputs of the run, by name."""
    non_persistent_step: NonPersistentStep | None = None
    """The step to resume from, if it is outside the run folder."""

    def load(self, train_module: TrainModule) -> StartPoint:
        """Load weights, optimizer and state on all ranks; ConfigError if the options do not fit the
        checkpoint."""
        if self.non_persistent_step is not None or self.found.latest is not None:
            return self._own(train_module)
        refuse_lost_steps(self.config, self.found)
        load = self.config.foreign_load()
        if load is not None:
            with self._opened_load(load) as checkpoint:
                return self._other(checkpoint, load, train_module)
        self._initialize_all(train_module)
        train_module.optimizer.adopt_model_parameters()
        return StartPoint(
            TrainState(), Ledger(), self.optimizer_schedule, "initial weights from --seed"
        )

    def _initialize_all(self, train_module: TrainModule) -> None:
        for chunk in train_module.chunks:
            self.initialize(chunk, self.config.training.seed)

    def _own(self, train_module: TrainModule) -> StartPoint:
        """The newest step of this run. --finetune applies only to the first start."""
        with self._opened(train_module) as checkpoint:
            if self.config.finetune:
                log.info(
                    "--finetune applied when this run began; resuming from its own step %d",
                    checkpoint.step,
                )
            is_changed = self._has_new_course(checkpoint)
            if is_changed:
                self._refuse_end(checkpoint.step, checkpoint.url)
            optimizer_schedule = self._resumed_schedule(checkpoint)
            state, ledger = resume(
                checkpoint,
                train_module,
                None if is_changed else self.length.global_batch_size,
                self._repadding(checkpoint, train_module),
                max(self.found.staying, default=0),
            )
            if is_changed:
                check_samples_left(self.config, state, self.length, self.num_samples)
            entry = self._course_entry(checkpoint, optimizer_schedule, train_module.groups.rank)
        origin = f"step {state.step} of this run"
        if self.non_persistent_step is not None:
            origin += f", in {self.non_persistent_step.root_url}"
        return StartPoint(state, ledger, optimizer_schedule, origin, entry)

    def _has_new_course(self, checkpoint: Restorable) -> bool:
        """Whether the options differ from those of the last step before a checkpoint."""
        before, _ = last_course(checkpoint.manifest, checkpoint.config, checkpoint.state)
        return bool(changes(before, course_of(self.config)))

    def _course_entry(
        self, checkpoint: Restorable, schedule: OptimizerSchedule, rank: int
    ) -> dict[str, Any] | None:
        """What changes in the course after a checkpoint, logged, for the ledger."""
        before, rates = last_course(checkpoint.manifest, checkpoint.config, checkpoint.state)
        now = Course(course_of(self.config), optimizer_schedule_document(schedule))
        changed = described(before, now.options)
        if changed and rank == 0:
            log.info("resuming from step %d with other options: %s", checkpoint.step, changed)
        return ledger_entry(before, rates, now)

    def _refuse_end(self, step: int, url: str) -> None:
        """Refuse other options for a run that has all its steps: they would have no effect."""
        if step >= self.length.steps:
            raise ConfigError(
                f"{url} is at step {step} and this run has {self.length.steps} (--train-iters, "
                "--train-samples): nothing is left to train with other options. Raise it to "
                "continue; "
                "to train from step 0, give --force, or another --save"
            )

    def _opened(self, train_module: TrainModule) -> Checkpoint:
        verify, groups = self.config.verify_checkpoint, train_module.groups
        step = self.found.latest
        if self.non_persistent_step is not None:
            where = self.non_persistent_step
            if groups.rank == 0:
                log.info("resuming from %s", where.description)
            return open_scattered(where.url, where.found.sight, verify)
        assert step is not None
        if groups.rank == 0:
            log.info("resuming from step %d in %s", step, self.config.save)
        return open_checkpoint(join(self.config.run_folder, step_folder(step)), verify=verify)

    def _opened_load(self, load: str) -> Checkpoint | LoadableSource:
        """The checkpoint of --load, trainyard's or another program's."""
        config = self.config
        if detect(load) in ("trainyard", None):
            return open_checkpoint(load, "--load", config.verify_checkpoint)
        tokenizer = Carried(self.tokenizer.files(), self.tokenizer.vocab_size)
        tp = config.parallel.tensor_model_parallel_size
        return open_loadable(load, config.model, tokenizer, tp)

    def _other(self, checkpoint: Restorable, load: str, train_module: TrainModule) -> StartPoint:
        """The step of --load: its weights with --finetune, otherwise its whole state."""
        config, state, optimizer_schedule = self.config, TrainState(), self.optimizer_schedule
        entry = None
        check_database(checkpoint, config.retrieval, self.input_digests)
        is_foreign = not isinstance(checkpoint, Checkpoint)
        check_tokenizer(checkpoint, self.tokenizer, config.finetune or is_foreign)
        repadding = self._repadding(checkpoint, train_module)
        if config.skip_train:
            restore_weights(checkpoint, train_module, repadding)
            state = TrainState(checkpoint.step)
            origin = f"step {checkpoint.step} of {checkpoint.url}, to measure it"
            return StartPoint(state, Ledger(), optimizer_schedule, origin)
        if config.finetune:
            allowed = Allowed(
                (*config.load_allow_missing, *self._lacking(checkpoint, train_module)),
                config.load_allow_unexpected,
            )
            if allowed.missing:
                self._initialize_all(train_module)
            restore_weights(checkpoint, train_module, repadding, allowed)
            train_module.optimizer.adopt_model_parameters()
        else:
            self._refuse_fitting(checkpoint, load)
            state = restore_training(
                checkpoint, train_module, repadding, with_optimizer=config.load_optim
            )
            state.unmeasured = {}  # a validation of the other run
        if state.step >= self.length.steps:
            raise ConfigError(
                f"--load {load} is at step {state.step} and this run has {self.length.steps} "
                "(--train-iters, --train-samples): nothing is left to train; raise it, or use "
                "--finetune"
            )
        if not config.finetune:
            if config.load_optim:
                optimizer_schedule = self._resumed_schedule(checkpoint)
            entry = self._course_entry(checkpoint, optimizer_schedule, train_module.groups.rank)
        check_samples_left(config, state, self.length, self.num_samples)
        origin = f"step {checkpoint.step} of {checkpoint.url}"
        return StartPoint(state, Ledger(state.ledger_digest), optimizer_schedule, origin, entry)

    def _refuse_fitting(self, checkpoint: Restorable, load: str) -> None:
        model_type = checkpoint.config["model"].get("model_type", "gpt")
        if model_type in family_of(self.config.model).fitted_from:
            raise ConfigError(
                f"--load {load} holds a {model_type}, from which no --model-type "
                f"{self.config.model.model_type} can resume; give --finetune to begin with its "
                "weights"
            )

    def _lacking(self, checkpoint: Restorable, train_module: TrainModule) -> tuple[str, ...]:
        """Patterns of the weights that a model of the checkpoint's family does not have."""
        model_type = checkpoint.config["model"].get("model_type", "gpt")
        patterns = family_of(self.config.model).fitted_from.get(model_type, ())
        if patterns and train_module.groups.rank == 0:
            log.info(
                "%s is a %s: its weights are taken, and those that a %s has beside them start from "
                "--seed",
                *(checkpoint.url, model_type, self.config.model.model_type),
            )
        return patterns

    def _repadding(self, checkpoint: Restorable, train_module: TrainModule) -> Repadding | None:
        found = repadding_of(
            checkpoint,
            self.config,
            self.tokenizer.vocab_size,
            self.padded_vocab_size,
            params_dtype(self.config.precision),
        )
        if found is not None and train_module.groups.rank == 0:
            log_repadding(found)
        return found

    def _resumed_schedule(self, checkpoint: Restorable) -> OptimizerSchedule:
        document = checkpoint.state.get("schedule")
        if document is None:  # a converted checkpoint may lack it
            log.info("the checkpoint has no learning rate schedule; using the one of the options")
            return self.optimizer_schedule
        return resume_optimizer_schedule(self.optimizer_schedule, document, self.config.optimizer)
