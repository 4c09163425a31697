"""Console lines in the format of Megatron-LM, for users and their scripts."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence

from trainyard.training.logging.run_info import RunInfo
from trainyard.training.logging.scalars import perplexity, tests, validations
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.ledger import StepRecord
from trainyard.training.loop.state import TrainState
from trainyard.training.loop.throughput import StepTiming
from trainyard.training.options.logging import LoggingConfig


def _print(line: str) -> None:
    print(line, flush=True)


class Console(Callback):
    """One line every `interval` steps, with mean loss and time, and one for each validation."""

    def __init__(
        self,
        info: RunInfo,
        interval: int,
        show_throughput: bool = False,
        write: Callable[[str], None] = _print,
    ) -> None:
        self._info = info
        self._interval = interval
        self._show_throughput = show_throughput
        self._write = write
        self._events: list[StepEvent] = []

    def begin(self, state: TrainState) -> None:
        """Reset the averages."""
        self._events = []

    def after_step(self, event: StepEvent) -> None:
        """Write the lines that are due."""
        if event.timing is not None:
            self._events.append(event)
        due = event.record.step % self._interval == 0 or event.is_last or event.is_stopping
        if due and self._events:
            now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
            self._write(training_line(self._events, self._info, self._show_throughput, now))
            self._events = []
        on = " on validation set" if event.is_last else ""
        record = event.record
        measured = [(*one, on, record.more_validation_losses) for one in validations(record)]
        measured += [(*one, " on test set", record.more_test_losses) for one in tests(record)]
        for suffix, loss, on, more in measured:
            for line in validation_lines(record.step, loss, suffix, on, more):
                self._write(line)


def make(config: LoggingConfig, info: RunInfo) -> Callback:
    """The console, as a logger."""
    return Console(info, config.log_interval, config.log_throughput)


def training_line(
    events: Sequence[StepEvent], info: RunInfo, show_throughput: bool, now: str
) -> str:
    """Megatron-LM's line: fields, names and order, with our own fields in between.

    Time and loss are means over the events; the loss only over steps with an update."""
    last = events[-1].record
    timings = [event.timing for event in events if event.timing is not None]
    fields = [
        f"iteration {last.step:8d}/{info.steps:8d}",
        f"consumed samples: {last.consumed_train_samples:12d}",
        f"elapsed time per iteration (ms): {_mean([t.ms for t in timings]):.1f}",
    ]
    if show_throughput:
        fields += _throughput(timings, info)
    next_step = events[-1].next_step
    if last.learning_rate is not None:
        fields.append(f"learning rate: {next_step.learning_rate:.6E}")
        if next_step.decoupled_learning_rate is not None:
            fields.append(f"decoupled learning rate: {next_step.decoupled_learning_rate:.6E}")
    fields.append(f"global batch size: {last.global_batch_size or 0:5d}")
    fields += _results(events)
    if show_throughput:
        fields += _waiting(events, timings, info)
    return f" [{now}] " + " | ".join(fields) + " |"


def _results(events: Sequence[StepEvent]) -> list[str]:
    """Loss, loss scale, norms and counts."""
    last, records = events[-1].record, [event.record for event in events]
    ran = [record for record in records if not record.passed_over]
    skipped = [record for record in ran if record.skipped]
    losses = [r.lm_loss for r in ran if r.lm_loss is not None and not r.skipped]
    fields = [f"lm loss: {_mean(losses):.6E}"] if losses else []
    fields += [f"{name}: {_mean(values):.6E}" for name, values in _more_losses(ran).items()]
    fields += [f"{name}: {_figure(value)}" for name, value in (last.layer_figures or {}).items()]
    fields.append(f"loss scale: {events[-1].next_step.loss_scale:.1f}")
    if last.grad_norm is not None:
        fields.append(f"grad norm: {last.grad_norm:.3f}")
    if last.num_zeros is not None:
        fields.append(f"num zeros: {last.num_zeros}")
    if last.params_norm is not None:
        fields.append(f"params norm: {last.params_norm:.3f}")
    fields.append(f"number of skipped iterations: {len(skipped):3d}")
    nans = sum(record.lm_loss is None for record in ran)
    fields.append(f"number of nan iterations: {nans:3d}")
    return fields


def _figure(value: float) -> str:
    """Whole numbers are names, such as that of an expert."""
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def _more_losses(ran: Sequence[StepRecord]) -> dict[str, list[float]]:
    """The further losses of the steps with an update, by name."""
    found: dict[str, list[float]] = {}
    for record in ran:
        for name, loss in (record.more_losses or {}).items() if not record.skipped else ():
            found.setdefault(name, []).append(loss)
    return found


def _throughput(timings: Sequence[StepTiming], info: RunInfo) -> list[str]:
    # Of the mean time, not the mean of rates.
    tokens = _of_mean_time([info.tokens_per_second_per_gpu(t) for t in timings])
    tflops = _of_mean_time([t.tflops_per_gpu for t in timings])
    fields = [
        f"tokens per GPU (tokens/s/GPU): {tokens:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {tflops:.1f}",
    ]
    mfu = info.mfu(tflops)
    if mfu is not None:
        fields.append(f"MFU (% of dense bf16 peak): {100 * mfu:.1f}")
    return [*fields, f"FLOP convention: {info.flops.name}"]


def _waiting(
    events: Sequence[StepEvent], timings: Sequence[StepTiming], info: RunInfo
) -> list[str]:
    share = sum(t.data_wait_ms for t in timings) / max(sum(t.ms for t in timings), 1e-9)
    last = events[-1].record
    left = info.steps - last.step
    if info.samples and last.global_batch_size:  # during a ramp: as if the rest had the last size
        left = -((last.consumed_train_samples - info.samples) // last.global_batch_size)
    seconds = max(left, 0) * timings[-1].ms / 1000.0
    if len(timings) > 1:
        seconds = max(left, 0) * _mean([t.ms for t in timings]) / 1000.0
    time_left = datetime.timedelta(seconds=round(seconds))
    return [f"data wait (%): {100 * share:.1f}", f"time left: {time_left}"]


def validation_lines(
    step: int,
    loss: float,
    suffix: str = "",
    on: str = "",
    more: Mapping[str, float] | None = None,
) -> list[str]:
    """Validation or test losses and their perplexities, framed as in Megatron-LM.

    on: " on validation set" or " on test set" at the end of a run. more: further losses by name,
    means over the sets."""
    line = f" validation{suffix} loss at iteration {step}{on} | " + "".join(
        f"{name} value: {value:.6E} | {name} PPL: {perplexity(value):.6E} | "
        for name, value in {"lm loss": loss, **(more or {})}.items()
    )
    rule = "-" * (len(line) + 1)
    return [rule, line, rule]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _of_mean_time(rates: Sequence[float]) -> float:
    return len(rates) / sum(1.0 / rate for rate in rates)
