"""Fabricated runs: everything that a training would publish, for tests of the proof."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trainyard.optim.config import OptimizerConfig
from trainyard.optim.precision import PrecisionConfig
from trainyard.optim.scaler import build_scaler
from trainyard.optim.schedule import build_optimizer_schedule
from trainyard.optim.schedule_resume import optimizer_schedule_document
from trainyard.training.certify.certificate import Certificate, Check
from trainyard.training.certify.proof import Prover, SampleDigest
from trainyard.training.loop.ledger import Ledger, StepRecord
from trainyard.training.loop.length import length_of
from trainyard.training.loop.seeds import step_digest
from trainyard.training.loop.state import TrainState
from trainyard.training.options.training import TrainingConfig
from trainyard.training.run.dp_history import DpSpan
from trainyard.training.run.run_record import (
    CourseRecord,
    Position,
    PublishedStep,
    RunRecord,
    RunStart,
)

SEQ_LENGTH = 16
TRAINING = TrainingConfig(
    micro_batch_size=2,
    global_batch_size=4,
    train_iters=12,
    eval_interval=5,
    eval_iters=1,
    seed=3,
)
OPTIMIZER = OptimizerConfig(lr=0.01, min_lr=0.001, lr_decay_style="cosine", lr_warmup_iters=3)
FP16 = PrecisionConfig(fp16=True, initial_loss_scale=2.0**8, loss_scale_window=3, hysteresis=1)


def digest_of(step: int, consumed: int, size: int) -> str:
    """Stands for the digest of samples."""
    return f"{step}/{consumed}/{size}"


@dataclass(kw_only=True)
class MadeRun:
    """A run and what it does at which step."""

    training: TrainingConfig = TRAINING
    optimizer: OptimizerConfig = OPTIMIZER
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    spans: tuple[DpSpan, ...] = ()
    overflows: Collection[int] = ()
    begin: TrainState = field(default_factory=TrainState)
    """Of the run that it goes on from."""

    @property
    def facts(self) -> RunRecord:
        return RunRecord(
            lineage="11ae",
            seq_length=SEQ_LENGTH,
            courses=(self._course,),
            spans=self.spans,
        )

    @property
    def _course(self) -> CourseRecord:
        lengths = (self.training.train_iters, self._final, self.training.train_samples)
        return CourseRecord(
            training=self.training,
            optimizer_schedule=build_optimizer_schedule(self.optimizer, *lengths),
            precision=self.precision,
        )

    @property
    def _final(self) -> int:
        return length_of(self.training, 1, SEQ_LENGTH).global_batch_size

    def published(self, staying: Sequence[int], passing: Sequence[int] = ()) -> list[PublishedStep]:
        """Checkpoints after these steps; a passing one carries lines that the next has as well."""
        facts, state = self.facts, TrainState(**self.begin.state_dict())
        course = facts.courses[0]
        length, ledger = facts.length(course), Ledger(state.ledger_digest)
        scaler = build_scaler(self.precision)
        scaler.load_state_dict(state.loss_scaler)
        found = []
        if self.training.eval_at_start and not state.step:
            ledger.add(StepRecord(0, 0, 0, validation_loss=9.0))
        for step in range(state.step + 1, max((*staying, *passing)) + 1):
            consumed = state.consumed_train_samples
            size = length.batch_size_schedule.at(consumed).global_batch_size
            span = facts.span(step)
            micro = self.training.micro_batch_size if span is None else span.micro_batch_size
            record = StepRecord(
                step,
                consumed + size,
                (consumed + size) * SEQ_LENGTH,
                size,
                samples=digest_of(step, consumed, size),
            )
            taken = step not in self.training.iterations_to_skip and step not in self.overflows
            if step in self.training.iterations_to_skip:
                record.passed_over = True
            else:
                rates = course.optimizer_schedule.at(state.scheduled_samples)
                record.lm_loss, record.grad_norm = 9.0 / step, 1.0
                record.learning_rate, record.weight_decay = (
                    rates.learning_rate,
                    rates.weight_decay,
                )
                record.rng = step_digest(self.training.seed, step, size // micro)
                record.loss_scale = None if scaler.scale == 1.0 else scaler.scale
                record.skipped = step in self.overflows or None
                scaler.update(step in self.overflows)
            if step in length.evaluation_steps:
                record.validation_loss = 8.0
            ledger.add(record)
            state.step, state.consumed_train_samples = step, consumed + size
            state.scheduled_samples += size * taken
            state.num_updates += taken
            state.ledger_digest, state.loss_scaler = ledger.digest, scaler.state_dict()
            if step in staying or step in passing:
                found.append(self._checkpoint(state, ledger.lines, step in staying))
            if step in staying:
                ledger.forget()
        return found

    def _checkpoint(self, state: TrainState, lines: list[str], stays: bool) -> PublishedStep:
        facts = {
            "seed": self.training.seed,
            "seq_length": SEQ_LENGTH,
            "schedule": optimizer_schedule_document(self._course.optimizer_schedule),
        }
        document = json.loads(json.dumps({**facts, **state.state_dict()}))
        where = f"iter_{state.step:07d}"
        return PublishedStep(state.step, where, tuple(lines), document, stays)

    @property
    def beginning(self) -> RunStart:
        names = asdict(Position())
        position = Position(**{name: getattr(self.begin, name) for name in names})
        return RunStart(position, self.begin.ledger_digest, self.begin.loss_scaler)

    def certify(
        self,
        published: Sequence[PublishedStep],
        *,
        samples: SampleDigest | None = digest_of,
        beginning: RunStart | None = None,
        **options: Any,
    ) -> Certificate:
        prover = Prover(self.facts, beginning or self.beginning, samples, **options)
        for step in published:
            prover.add(step)
        return prover.certificate(Check("files", checked=1))
