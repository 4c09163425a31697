"""The lines that users of Megatron-LM, and their scripts, read."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable

from trainyard.training.callbacks.base import Callback, StepEvent
from trainyard.training.ledger import StepRecord
from trainyard.training.state import TrainState

SCARCE = 20.0
"""Bound of the exponent of a printed perplexity."""


def _print(line: str) -> None:
    print(line, flush=True)


class Console(Callback):
    """One line every `interval` steps, the loss averaged over them, and one for each
    measurement."""

    def __init__(
        self,
        train_iters: int,
        interval: int,
        show_throughput: bool = False,
        write: Callable[[str], None] = _print,
    ) -> None:
        self._train_iters = train_iters
        self._interval = interval
        self._show_throughput = show_throughput
        self._write = write
        self._events: list[StepEvent] = []

    def begin(self, state: TrainState) -> None:
        """Start a new average."""
        self._events = []

    def after_step(self, event: StepEvent) -> None:
        """Write what is due."""
        if event.timing is not None:
            self._events.append(event)
        due = event.record.step % self._interval == 0 or event.is_last or event.is_stopping
        if due and self._events:
            now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
            self._write(training_line(self._events, self._train_iters, self._show_throughput, now))
            self._events = []
        for name, loss in _validations(event.record):
            for line in validation_lines(event.record.step, loss, name):
                self._write(line)


def _validations(record: StepRecord) -> list[tuple[str, float]]:
    """Names, as Megatron-LM numbers its validation sets, and losses; the one set alone has none."""
    if record.validation_losses is not None:
        losses = record.validation_losses.values()
        return [(f"-{number}", loss) for number, loss in enumerate(losses)]
    return [] if record.validation_loss is None else [("", record.validation_loss)]


def training_line(
    events: list[StepEvent], train_iters: int, show_throughput: bool, now: str
) -> str:
    """Megatron-LM's line: fields, names and order; time and loss are means over the events."""
    last = events[-1].record
    timings = [event.timing for event in events if event.timing is not None]
    losses = [event.record.lm_loss or 0.0 for event in events]
    fields = [
        f"iteration {last.step:8d}/{train_iters:8d}",
        f"consumed samples: {last.consumed_train_samples:12d}",
        f"elapsed time per iteration (ms): {_mean([t.ms for t in timings]):.1f}",
    ]
    if show_throughput:
        # of the mean time, not the mean of rates
        rate = len(timings) / sum(1.0 / t.tflops_per_gpu for t in timings)
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {rate:.1f}")
    fields += [
        f"learning rate: {last.learning_rate:.6E}",
        f"global batch size: {last.global_batch_size:5d}",
        f"lm loss: {_mean(losses):.6E}",
        "loss scale: 1.0",
        f"grad norm: {last.grad_norm:.3f}",
        f"number of skipped iterations: {0:3d}",
        f"number of nan iterations: {0:3d}",
    ]
    return f" [{now}] " + " | ".join(fields) + " |"


def validation_lines(step: int, loss: float, name: str = "") -> list[str]:
    """A validation loss and its perplexity, framed as Megatron-LM frames it."""
    perplexity = math.exp(min(SCARCE, loss))
    line = (
        f" validation{name} loss at iteration {step} | lm loss value: {loss:.6E} | "
        f"lm loss PPL: {perplexity:.6E} | "
    )
    rule = "-" * (len(line) + 1)
    return [rule, line, rule]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
