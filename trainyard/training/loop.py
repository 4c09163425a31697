"""The loop: steps, the ledger, measurements of the validation loss, and what callbacks make of
them.

Knows no files and no command line; it ends when the steps are done, or when it is asked to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from trainyard.datasets.loader import Batch
from trainyard.optim.schedule import Schedule
from trainyard.training.callbacks.base import Callback, StepEvent
from trainyard.training.config import TrainingConfig
from trainyard.training.data import RunData
from trainyard.training.ledger import Ledger, StepRecord
from trainyard.training.metrics import StepTiming, Workload
from trainyard.training.state import TrainState
from trainyard.training.step import StepResult, Trainee

log = logging.getLogger(__name__)

Outcome = Literal["finished", "stopped", "paused"]


def _never() -> bool:
    return False


class TrainLoop:
    """Trains from the step that `state` is at to the last."""

    def __init__(
        self,
        trainee: Trainee,
        schedule: Schedule,
        data: RunData,
        config: TrainingConfig,
        workload: Workload,
        *,
        callbacks: Sequence[Callback] = (),
        state: TrainState | None = None,
        ledger: Ledger | None = None,
        stop_requested: Callable[[], bool] = _never,
    ) -> None:
        self.state = state or TrainState()
        self.ledger = ledger or Ledger(self.state.ledger_digest)
        self._trainee = trainee
        self._schedule = schedule
        self._data = data
        self._config = config
        self._workload = workload
        self._callbacks = callbacks
        self._stop_requested = stop_requested
        self._evaluation_steps = config.evaluation_steps()

    def run(self) -> Outcome:
        """Train; `stopped` by a signal and `paused` by --exit-interval leave the run unfinished."""
        for callback in self._callbacks:
            callback.begin(self.state)
        outcome = self._steps()
        for callback in self._callbacks:
            callback.end()
        return outcome

    def _steps(self) -> Outcome:
        outcome = self._before_steps()
        if outcome != "finished":
            return outcome
        consumed = self.state.consumed_train_samples
        batches, digests = self._data.train_batches(consumed), self._data.step_digests(consumed)
        for step in range(self.state.step + 1, self._config.train_iters + 1):
            outcome = self._step(step, batches, digests)
            if outcome != "finished":
                return outcome
        return "finished"

    def _before_steps(self) -> Outcome:
        """The measurement at the start, or the one that a stop of the run cut short."""
        if self.state.unmeasured:
            record = StepRecord(**self.state.unmeasured)
        elif self.state.step == 0 and self._config.eval_at_start:
            record = StepRecord(0, 0, 0)
        else:
            return "finished"
        losses = self._evaluate(record.step)
        if losses is None:  # nothing is lost: this is done again
            return "stopped"
        record.set_validation(losses)
        self.state.unmeasured = {}
        outcome = self._outcome(record.step, stop=False) if record.step else "finished"
        self._tell(record, None, is_stopping=outcome != "finished")
        return outcome

    def _step(self, step: int, batches: Iterator[Batch], digests: Iterator[str]) -> Outcome:
        began = time.perf_counter()
        rate = self._schedule.learning_rate.at(self.state.consumed_train_samples)
        decay = self._schedule.weight_decay.at(self.state.consumed_train_samples)
        result = self._trainee.step(step, batches, rate, decay, self._stop_requested())
        self._advance(step)
        record = self._record(result, rate, decay, next(digests))
        seconds = time.perf_counter() - began
        timing = self._workload.timing(step, seconds, self._trainee.device)
        if step in self._evaluation_steps:
            losses = None if result.stop else self._evaluate(step)
            if losses is None:
                self.state.unmeasured = record.document()
                self._announce(record, timing, is_stopping=True)
                return "stopped"
            record.set_validation(losses)
        outcome = self._outcome(step, result.stop)
        self._tell(record, timing, is_stopping=outcome != "finished")
        return outcome

    def _advance(self, step: int) -> None:
        self.state.step = step
        self.state.consumed_train_samples += self._data.batch_size.global_batch_size
        self.state.num_updates = self._trainee.optimizer.num_updates

    def _record(self, result: StepResult, rate: float, decay: float, samples: str) -> StepRecord:
        size = self._data.batch_size.global_batch_size
        consumed = self.state.consumed_train_samples
        return StepRecord(
            step=self.state.step,
            consumed_train_samples=consumed,
            tokens=consumed * (self._workload.tokens // size),
            global_batch_size=size,
            lm_loss=result.lm_loss,
            learning_rate=rate,
            weight_decay=decay,
            grad_norm=result.grad_norm,
            samples=samples,
        )

    def _outcome(self, step: int, stop: bool) -> Outcome:
        """A stop that comes with the last step has nothing left to stop."""
        if step == self._config.train_iters:
            return "finished"
        if stop:
            return "stopped"
        interval = self._config.exit_interval
        return "paused" if interval is not None and step % interval == 0 else "finished"

    def _evaluate(self, step: int) -> dict[str, float] | None:
        """The loss of each validation set on the samples of this measurement; None when a request
        to stop came before it was done. Measurements draw nothing, so one that is made again is
        what the first would have been."""
        number = self._evaluation_steps.index(step)
        losses: dict[str, float] = {}
        for name, batches, count in self._data.validations(number, self._config.eval_iters):
            loss = self._trainee.evaluate(batches, count, self._stop_requested)
            if loss is None:
                log.info("asked to stop: the validation at step %d is left for later", step)
                return None
            losses[name] = loss
        return losses

    def _tell(self, record: StepRecord, timing: StepTiming | None, is_stopping: bool) -> None:
        self.ledger.add(record)
        self.state.ledger_digest = self.ledger.digest
        self._announce(record, timing, is_stopping)

    def _announce(self, record: StepRecord, timing: StepTiming | None, is_stopping: bool) -> None:
        is_last = record.step == self._config.train_iters
        is_measured = not self.state.unmeasured
        event = StepEvent(
            record, timing, self.state, self.ledger, is_last, is_stopping, is_measured
        )
        for callback in self._callbacks:
            callback.after_step(event)
