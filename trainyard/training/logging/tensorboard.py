"""TensorBoard, with Megatron-LM's tags and both of its x axes: steps, and samples in the tags that
end in `vs samples`."""

from __future__ import annotations

from typing import Any

from trainyard.errors import ConfigError
from trainyard.training.logging.run_info import NewSaves, RunInfo
from trainyard.training.logging.scalars import (
    Scalar,
    save_scalars,
    step_scalars,
    validation_scalars,
)
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.state import TrainState
from trainyard.training.options.logging import LoggingConfig


class TensorBoard(Callback):
    """Writes the figures of steps and validations; `writer` is torch's SummaryWriter."""

    def __init__(self, writer: Any, config: LoggingConfig, info: RunInfo) -> None:
        self._writer = writer
        self._config = config
        self._info = info
        self._saves = NewSaves(info)

    def begin(self, state: TrainState) -> None:
        """Write the options, once."""
        if state.step == 0 and self._info.config:
            rows = [f"| {name} | {value} |" for name, value in self._info.config.items()]
            self._writer.add_text("options", "\n".join(["| option | value |", "|-|-|", *rows]), 0)

    def after_step(self, event: StepEvent) -> None:
        """Write the figures that are due."""
        step = event.record.step
        scalars = validation_scalars(event.record, self._config)
        if step % self._config.tensorboard_log_interval == 0:
            scalars += step_scalars(event, self._config, self._info)
            scalars += [Scalar(tag, value) for tag, value in self._info.gauges.items()]
        for scalar in scalars:
            self._writer.add_scalar(scalar.tag, scalar.value, step)
            if scalar.has_samples:
                samples = event.record.consumed_train_samples
                self._writer.add_scalar(f"{scalar.tag} vs samples", scalar.value, samples)

        self._write_saves()

    def _write_saves(self) -> None:
        """At the saved steps, perhaps earlier ones."""
        for report in self._saves.take():
            for scalar in save_scalars(report):
                self._writer.add_scalar(scalar.tag, scalar.value, report.step)

    def end(self) -> None:
        """Flush and close."""
        self._write_saves()
        self._writer.close()

    def failed(self) -> None:
        """Flush and close."""
        self._writer.close()


def make(config: LoggingConfig, info: RunInfo) -> Callback | None:
    """TensorBoard, if --tensorboard-dir names a folder."""
    if not config.tensorboard_dir:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            f"--tensorboard-dir {config.tensorboard_dir} needs the package tensorboard ({error}): "
            "pip install '.[logging]' in the checkout, or leave the option out"
        ) from error
    writer: Any = SummaryWriter(config.tensorboard_dir, max_queue=config.tensorboard_queue_size)
    return TensorBoard(writer, config, info)
