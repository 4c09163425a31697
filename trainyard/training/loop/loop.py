"""The loop: steps, the ledger, measurements of the validation and test loss, and what callbacks
make of them.

Knows no files and no command line; it ends when the steps are done, or when it is asked to."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Literal

from trainyard.datasets.loader import Batch, end_loading
from trainyard.errors import RerunElsewhere, ValidationFailed
from trainyard.optim.schedule import Rates, Schedule
from trainyard.training.loop.batch_size import BatchSize
from trainyard.training.loop.data import Measurement, RunData
from trainyard.training.loop.data_wait import DataWait
from trainyard.training.loop.events import Callback, Following, StepEvent
from trainyard.training.loop.ledger import Ledger, StepRecord
from trainyard.training.loop.length import RunLength
from trainyard.training.loop.sample_check import NextSamples, SampleCheck, StepEvidence
from trainyard.training.loop.state import TrainState
from trainyard.training.loop.step import StepResult, TrainModule
from trainyard.training.loop.throughput import StepTiming, Workload
from trainyard.training.options.training import TrainingConfig

log = logging.getLogger(__name__)

Outcome = Literal["finished", "stopped", "paused"]


def _never() -> bool:
    return False


class TrainLoop:
    """Trains from the step that `state` is at to the last."""

    def __init__(
        self,
        trainee: TrainModule,
        schedule: Schedule,
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
    ) -> None:
        """wait: measures how long batches are waited for."""
        self.state = state or TrainState()
        self.ledger = ledger or Ledger(self.state.ledger_digest)
        self._trainee = trainee
        self._schedule = schedule
        self._data = data
        self._config = config
        self._workload = workload
        self._callbacks = callbacks
        self._stop_requested = stop_requested
        self._length = length
        self._evaluation_steps = list(length.evaluation_steps)
        self._wait = wait or DataWait()
        self._began = time.monotonic()
        self._first_step = self.state.step

    def run(self) -> Outcome:
        """Train; `stopped` by a signal and `paused` by --exit-interval leave the run unfinished."""
        try:
            for callback in self._callbacks:
                callback.begin(self.state)
            outcome = self._steps()
            for callback in self._callbacks:
                callback.end()
        except BaseException:
            for callback in self._callbacks:
                callback.failed()
            raise
        return outcome

    def _steps(self) -> Outcome:
        outcome = self._before_steps()
        if outcome != "finished":
            return outcome
        consumed = self.state.consumed_train_samples
        batches = self._data.train_batches(consumed)
        watched, samples = self._wait.watch(batches), self._data.step_samples(consumed)
        try:
            for step in range(self.state.step + 1, self._length.steps + 1):
                outcome = self._step(step, watched, samples)
                if outcome != "finished":
                    return outcome
        finally:
            end_loading(batches)
        return "finished"

    def _before_steps(self) -> Outcome:
        """The measurement at the start, or the one that a stop of the run cut short."""
        if self.state.unmeasured:
            record = StepRecord(**self.state.unmeasured)
        elif self.state.step == 0 and self._config.eval_at_start:
            record = StepRecord(0, 0, 0)
        else:
            return "finished"
        if not self._measure(record):  # nothing is lost: this is done again
            return "stopped"
        self.state.unmeasured = {}
        outcome = self._outcome(record.step, stop=False) if record.step else "finished"
        self._tell(record, None, is_stopping=outcome != "finished")
        return outcome

    def _step(self, step: int, batches: Iterator[Batch], samples: NextSamples | None) -> Outcome:
        self._wait.take()  # what a measurement waited for is not this step's
        began = time.perf_counter()
        size = self._length.schedule.at(self.state.consumed_train_samples)
        rates = self._schedule.at(self.state.scheduled_samples)
        evidence = StepEvidence(step, size, self._config.seed, self._trainee.groups, samples)
        result = None
        if step in self._config.iterations_to_skip:
            self._pass_over(step, size, batches, evidence)
        else:
            try:
                stop = self._asked_to_stop()
                result = self._trainee.step(step, size, batches, rates, stop, evidence.check)
            except (RerunElsewhere, ValidationFailed):
                self._save_before_fault()
                raise
        self._advance(step, size, is_taken=result is not None and not result.skipped)
        stop = result is not None and result.stop
        record = self._record(result, size, rates, evidence)
        seconds = time.perf_counter() - began
        timing = None  # samples that were passed over were not trained on
        if result is not None:
            timing = self._workload.timing(
                step, seconds, self._trainee.device, size.global_batch_size, self._wait.take()
            )
        if step in self._evaluation_steps and (stop or not self._measure(record)):
            self.state.unmeasured = record.document()
            self._announce(record, timing, is_stopping=True)
            return "stopped"
        outcome = self._outcome(step, stop)
        self._tell(record, timing, is_stopping=outcome != "finished")
        return outcome

    def _save_before_fault(self) -> None:
        """Have the state before the step saved, as on a request to stop: nothing was updated."""
        if self.state.step == self._first_step:
            return  # it was begun from there
        consumed = self.state.consumed_train_samples
        tokens = consumed * self._workload.tokens_per_sample
        self._announce(StepRecord(self.state.step, consumed, tokens), None, is_stopping=True)

    def _asked_to_stop(self) -> bool:
        """By a signal, or by --exit-duration-in-mins; the step that is begun is still taken."""
        minutes = self._config.exit_duration_in_mins
        over = minutes is not None and time.monotonic() - self._began > 60.0 * minutes
        return over or self._stop_requested()

    def _pass_over(
        self, step: int, size: BatchSize, batches: Iterator[Batch], evidence: StepEvidence
    ) -> None:
        """Take the samples of a step of --iterations-to-skip, and do nothing with them."""
        log.info("passing over the samples of step %d (--iterations-to-skip)", step)
        taken = SampleCheck(step, size.num_microbatches)
        deque(islice(taken.watch(batches), size.num_microbatches), maxlen=0)
        evidence.check_samples(taken)

    def _advance(self, step: int, size: BatchSize, is_taken: bool) -> None:
        self.state.step = step
        self.state.consumed_train_samples += size.global_batch_size
        self.state.scheduled_samples += size.global_batch_size if is_taken else 0
        self.state.num_updates = self._trainee.optimizer.num_updates
        self.state.loss_scaler = self._trainee.optimizer.scaler.state_dict()

    def _record(
        self, result: StepResult | None, size: BatchSize, rates: Rates, evidence: StepEvidence
    ) -> StepRecord:
        consumed = self.state.consumed_train_samples
        record = StepRecord(
            step=self.state.step,
            consumed_train_samples=consumed,
            tokens=consumed * self._workload.tokens_per_sample,
            global_batch_size=size.global_batch_size,
            samples=evidence.samples,
        )
        if result is None:
            record.passed_over = True
            return record
        record.lm_loss = _finite(result.lm_loss)
        record.learning_rate, record.weight_decay = rates.learning_rate, rates.weight_decay
        record.grad_norm = _finite(result.grad_norm)
        record.rng = evidence.rng
        if result.loss_scale != 1.0:
            record.loss_scale = result.loss_scale
        record.skipped = result.skipped or None
        record.num_zeros, record.params_norm = result.num_zeros, result.params_norm
        return record

    def _outcome(self, step: int, stop: bool) -> Outcome:
        """A stop that comes with the last step has nothing left to stop."""
        if step == self._length.steps:
            return "finished"
        if stop:
            return "stopped"
        interval = self._config.exit_interval
        return "paused" if interval is not None and step % interval == 0 else "finished"

    def _measure(self, record: StepRecord) -> bool:
        """Enter the loss of each validation set on the samples of this measurement, and behind the
        last step those of the test sets too; False, with nothing entered, when a request to stop
        came before it was done. Measurements draw nothing, so one that is made again is what the
        first would have been."""
        step, eval_iters = record.step, self._config.eval_iters
        number = self._evaluation_steps.index(step)
        losses = self._evaluate(self._data.validations(number, eval_iters))
        tests: dict[str, float] | None = {}
        if losses is not None and step == self._length.steps:
            tests = self._evaluate(self._data.tests(eval_iters))
        if losses is None or tests is None:
            log.info("asked to stop: the validation at step %d is left for later", step)
            return False
        record.set_validation(losses)
        record.set_test(tests)
        return True

    def _evaluate(self, sets: Iterator[Measurement]) -> dict[str, float] | None:
        """The loss of each set by name; None when a request to stop came first."""
        losses: dict[str, float] = {}
        at_once = self._length.schedule.final.num_microbatches
        for name, batches, count in sets:
            watched = self._wait.watch(batches)
            loss = self._trainee.evaluate(watched, count, self._stop_requested, at_once)
            if loss is None:
                return None
            losses[name] = loss
        return losses

    def _tell(self, record: StepRecord, timing: StepTiming | None, is_stopping: bool) -> None:
        self.ledger.add(record)
        self.state.ledger_digest = self.ledger.digest
        self._announce(record, timing, is_stopping)

    def _announce(self, record: StepRecord, timing: StepTiming | None, is_stopping: bool) -> None:
        is_last = record.step == self._length.steps
        is_measured = not self.state.unmeasured
        following = self._following()
        event = StepEvent(
            record, timing, following, self.state, self.ledger, is_last, is_stopping, is_measured
        )
        for callback in self._callbacks:
            callback.after_step(event)

    def _following(self) -> Following:
        rates = self._schedule.at(self.state.scheduled_samples)
        return Following(
            rates.learning_rate,
            None if self._schedule.decoupled is None else rates.decoupled_learning_rate,
            self._trainee.optimizer.loss_scale,
        )


def _finite(value: float) -> float | None:
    """What JSON can say; a step that overflowed in fp16 has no loss."""
    return value if math.isfinite(value) else None
