"""The training loop: steps, ledger, validation and test loss, callbacks.

Knows no files and no command line. It ends after the last step, or on a request to stop."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal

from trainyard.datasets.loader import Batch, end_loading
from trainyard.errors import RerunElsewhere, ValidationFailed
from trainyard.optim.schedule import OptimizerSchedule, Rates
from trainyard.training.loop.batch_size import BatchSize
from trainyard.training.loop.data import Measurement, RunData
from trainyard.training.loop.events import Callback, NextStep, StepEvent
from trainyard.training.loop.ledger import EvaluationLosses, Ledger, StepRecord
from trainyard.training.loop.length import RunLength
from trainyard.training.loop.sample_check import ConsumedSamples, ExpectedSamples, SampleCheck
from trainyard.training.loop.state import TrainState
from trainyard.training.loop.step import StepResult, TrainModule
from trainyard.training.loop.throughput import DataWait, StepTiming, Workload
from trainyard.training.options.training import TrainingConfig

log = logging.getLogger(__name__)

Interruption = Literal["stopped", "paused"]
"""Ends a run before its last step: by a signal, or by --exit-interval."""
Outcome = Literal["finished"] | Interruption


def _never() -> bool:
    return False


class TrainLoop:
    """Trains from the step in `state` to the last step."""

    def __init__(
        self,
        train_module: TrainModule,
        optimizer_schedule: OptimizerSchedule,
        data: RunData,
        config: TrainingConfig,
        length: RunLength,
        workload: Workload,
        *,
        callbacks: Sequence[Callback] = (),
        state: TrainState | None = None,
        ledger: Ledger | None = None,
        stop_requested: Callable[[], bool] = _never,
        wait: DataWait | None = None,
        course: dict[str, Any] | None = None,
    ) -> None:
        """wait: measures the time that training waits for batches. course: entry of the first
        step's line, if the options change there."""
        self.state = state or TrainState()
        self.ledger = ledger or Ledger(self.state.ledger_digest)
        self._train_module = train_module
        self._optimizer_schedule = optimizer_schedule
        self._data = data
        self._config = config
        self._workload = workload
        self._callbacks = callbacks
        self._stop_requested = stop_requested
        self._length = length
        self._evaluation_steps = list(length.evaluation_steps)
        self._wait = wait or DataWait()
        self._course = course
        self._began = time.monotonic()
        self._first_step = self.state.step

    def run(self) -> Outcome:
        """Train; `stopped` by a signal and `paused` by --exit-interval leave the run unfinished."""
        try:
            for callback in self._callbacks:
                callback.begin(self.state)
            outcome = self._run()
            for callback in self._callbacks:
                callback.end()
        except BaseException:
            for callback in self._callbacks:
                callback.failed()
            raise
        return outcome

    def measure(self) -> StepRecord | None:
        """Validation and test losses of the model as it is, for callbacks too; None when a request
        to stop came first."""
        for callback in self._callbacks:
            callback.begin(self.state)
        consumed = self.state.consumed_train_samples
        record = StepRecord(self.state.step, consumed, consumed * self._workload.tokens_per_sample)
        eval_iters = self._config.eval_iters
        losses = self._evaluate(self._data.validations(0, eval_iters))
        tests = None if losses is None else self._evaluate(self._data.tests(eval_iters))
        if losses is None or tests is None:
            return None
        record.set_validation(losses)
        record.set_test(tests)
        self._close_step(record, None, is_stopping=True)
        for callback in self._callbacks:
            callback.end()
        return record

    def _run(self) -> Outcome:
        if (interruption := self._first_validation()) is not None:
            return interruption
        consumed = self.state.consumed_train_samples
        batches = self._data.train_batches(consumed)
        watched, samples = self._wait.watch(batches), self._data.expected_samples(consumed)
        try:
            for step in range(self.state.step + 1, self._length.steps + 1):
                if (interruption := self._step(step, watched, samples)) is not None:
                    return interruption
        finally:
            end_loading(batches)
        return "finished"

    def _first_validation(self) -> Interruption | None:
        """The validation before the first step, or the one that a stop of the run cut short."""
        if self.state.unmeasured:
            record = StepRecord(**self.state.unmeasured)
            if record.step not in self._evaluation_steps:  # its options did, before they changed
                self.state.unmeasured = {}
                self._close_step(record, None, is_stopping=False)
                return None
        elif self.state.step == 0 and self._config.eval_at_start:
            record = StepRecord(0, 0, 0)
        else:
            return None
        if not self._validate(record):  # nothing is lost: the next start validates again
            return "stopped"
        self.state.unmeasured = {}
        interruption = self._interruption(record.step, stop=False) if record.step else None
        self._close_step(record, None, is_stopping=interruption is not None)
        return interruption

    def _step(
        self, step: int, batches: Iterator[Batch], samples: ExpectedSamples | None
    ) -> Interruption | None:
        """Train one step, validate if it is due, enter the step in the ledger, call callbacks."""
        state, config, optimizer = self.state, self._config, self._train_module.optimizer
        self._wait.take()  # the wait of a validation is not this step's
        began = time.perf_counter()

        # The schedules of batch size, learning rate and weight decay.
        size = self._length.batch_size_schedule.at(state.consumed_train_samples)
        rates = self._optimizer_schedule.at(state.scheduled_samples)
        sample_check = SampleCheck(step, size, config.seed, self._train_module.groups, samples)

        result = None
        if step in config.iterations_to_skip:
            log.info("consuming samples without an update: step=%d (--iterations-to-skip)", step)
            consumed = ConsumedSamples(step, size.num_microbatches)
            deque(islice(consumed.watch(batches), size.num_microbatches), maxlen=0)
            sample_check.check_samples(consumed)
        else:
            minutes = config.exit_duration_in_mins
            is_over = minutes is not None and time.monotonic() - self._began > 60.0 * minutes
            stop_now = is_over or self._stop_requested()  # after this step
            try:
                result = self._train_module.step(
                    step, size, batches, rates, stop_now, sample_check.check
                )
            except (RerunElsewhere, ValidationFailed):
                self._save_before_fault()
                raise

        # The position of the run, which checkpoints save.
        state.step = step
        state.consumed_train_samples += size.global_batch_size
        if result is not None and not result.skipped:
            state.scheduled_samples += size.global_batch_size
        state.num_updates = optimizer.num_updates
        state.loss_scaler = optimizer.scaler.state_dict()

        # The ledger's line and the timing of the step.
        record = self._record(result, size, rates, sample_check)
        timing = None  # a step of --iterations-to-skip has none
        if result is not None:
            timing = self._workload.timing(
                step,
                time.perf_counter() - began,
                self._train_module.device,
                size.global_batch_size,
                self._wait.take(),
            )

        stop = result is not None and result.stop
        if step in self._evaluation_steps and (stop or not self._validate(record)):
            state.unmeasured = record.document()  # the next start validates
            self._call_callbacks(record, timing, is_stopping=True)
            return "stopped"
        interruption = self._interruption(step, stop)
        self._close_step(record, timing, is_stopping=interruption is not None)
        return interruption

    def _save_before_fault(self) -> None:
        """Save the state before the step, as on a request to stop: nothing was updated."""
        if self.state.step == self._first_step:
            return  # the run resumed there
        consumed = self.state.consumed_train_samples
        tokens = consumed * self._workload.tokens_per_sample
        record = StepRecord(self.state.step, consumed, tokens)
        self._call_callbacks(record, None, is_stopping=True)

    def _record(
        self, result: StepResult | None, size: BatchSize, rates: Rates, sample_check: SampleCheck
    ) -> StepRecord:
        consumed = self.state.consumed_train_samples
        record = StepRecord(
            step=self.state.step,
            consumed_train_samples=consumed,
            tokens=consumed * self._workload.tokens_per_sample,
            global_batch_size=size.global_batch_size,
            samples=sample_check.samples,
            course=self._course,
        )
        self._course = None
        if result is None:
            record.passed_over = True
            return record
        record.lm_loss = _finite(result.lm_loss)
        if result.more_losses:
            record.more_losses = {n: v for n, v in result.more_losses.items() if math.isfinite(v)}
        report = result.report
        record.layer_figures = dict(report.figures) or None
        if self.state.step == self._length.steps and report.loads:
            record.layer_loads = {str(n): list(loads) for n, loads in report.loads.items()}
            drops = {str(n): list(shares) for n, shares in report.drops.items()}
            record.layer_drops = drops or None
        record.learning_rate, record.weight_decay = rates.learning_rate, rates.weight_decay
        record.grad_norm = _finite(result.grad_norm)
        record.rng = sample_check.rng
        if result.loss_scale != 1.0:
            record.loss_scale = result.loss_scale
        record.skipped = result.skipped or None
        record.num_zeros, record.params_norm = result.num_zeros, result.params_norm
        return record

    def _interruption(self, step: int, stop: bool) -> Interruption | None:
        """Whether the run ends early after this step. A stop at the last step finishes the run."""
        if step == self._length.steps:
            return None
        if stop:
            return "stopped"
        interval = self._config.exit_interval
        return "paused" if interval is not None and step % interval == 0 else None

    def _validate(self, record: StepRecord) -> bool:
        """Enter the loss of each validation set, and after the last step of each test set.

        False, with nothing entered, when a request to stop came first. Validation draws no random
        numbers, so a later one gives the same losses."""
        step, eval_iters = record.step, self._config.eval_iters
        number = self._evaluation_steps.index(step)
        losses = self._evaluate(self._data.validations(number, eval_iters))
        tests: dict[str, EvaluationLosses] | None = {}
        if losses is not None and step == self._length.steps:
            tests = self._evaluate(self._data.tests(eval_iters))
        if losses is None or tests is None:
            log.info("stop requested: the next start validates step=%d", step)
            return False
        record.set_validation(losses)
        record.set_test(tests)
        return True

    def _evaluate(self, sets: Iterator[Measurement]) -> dict[str, EvaluationLosses] | None:
        """The losses of each set by name; None if a request to stop interrupted it."""
        losses: dict[str, EvaluationLosses] = {}
        at_once = self._length.batch_size_schedule.final.num_microbatches
        for measured in sets:
            watched = self._wait.watch(measured.batches)
            found = self._train_module.evaluate(
                watched,
                measured.num_microbatches,
                self._stop_requested,
                at_once,
                measured.last_filled,
            )
            if found is None:
                return None
            losses[measured.name] = found
        return losses

    def _close_step(self, record: StepRecord, timing: StepTiming | None, is_stopping: bool) -> None:
        self.ledger.add(record)
        self.state.ledger_digest = self.ledger.digest
        self._call_callbacks(record, timing, is_stopping)

    def _call_callbacks(
        self, record: StepRecord, timing: StepTiming | None, is_stopping: bool
    ) -> None:
        rates = self._optimizer_schedule.at(self.state.scheduled_samples)
        next_step = NextStep(
            rates.learning_rate,
            None if self._optimizer_schedule.decoupled is None else rates.decoupled_learning_rate,
            self._train_module.optimizer.loss_scale,
        )
        event = StepEvent(
            *(record, timing, next_step, self.state, self.ledger),
            is_last=record.step == self._length.steps,
            is_stopping=is_stopping,
            is_measured=not self.state.unmeasured,
        )
        for callback in self._callbacks:
            callback.after_step(event)


def _finite(value: float) -> float | None:
    """A number that JSON has; a step that overflowed in fp16 has no loss."""
    return value if math.isfinite(value) else None
