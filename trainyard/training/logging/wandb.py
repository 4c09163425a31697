"""Weights & Biases, under the tags of TensorBoard. WANDB_MODE=offline keeps everything in
--wandb-save-dir; `wandb sync` sends it later."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from trainyard.errors import ConfigError
from trainyard.training.logging.run_info import NewSaves, RunInfo
from trainyard.training.logging.scalars import save_scalars, step_scalars, validation_scalars
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.options.logging import LoggingConfig

SAMPLES = "samples"
"""Metric for the x axis of a chart, instead of tags ending in `vs samples`."""


class WandB(Callback):
    """Sends the figures of steps and validations; `run` is the result of wandb.init."""

    def __init__(self, run: Any, config: LoggingConfig, info: RunInfo) -> None:
        self._run = run
        self._config = config
        self._info = info
        self._saves = NewSaves(info)
        self._last_step = 0

    def after_step(self, event: StepEvent) -> None:
        """Send the figures that are due."""
        record = event.record
        scalars = validation_scalars(record, self._config)
        figures: dict[str, float] = {}
        if record.step % self._config.tensorboard_log_interval == 0:
            scalars += step_scalars(event, self._config, self._info)
            figures.update(self._info.gauges)
        figures.update({scalar.tag: scalar.value for scalar in scalars})
        figures.update(self._new_saves())
        self._last_step = record.step
        if figures:
            figures[SAMPLES] = float(record.consumed_train_samples)
            self._run.log(figures, step=record.step)

    def _new_saves(self) -> dict[str, float]:
        """Costs of saves, at the current step: steps must be logged in order."""
        reports = self._saves.take()
        return {s.tag: s.value for report in reports for s in save_scalars(report)}

    def end(self) -> None:
        """Send the rest."""
        last = self._new_saves()
        if last:
            self._run.log(last, step=self._last_step)
        self._run.finish()

    def failed(self) -> None:
        """Send the rest, and mark the run as failed."""
        self._run.finish(exit_code=1)


def make(config: LoggingConfig, info: RunInfo) -> Callback | None:
    """Weights & Biases, if --wandb-project names a project."""
    if not config.wandb_project:
        return None
    try:
        wandb = importlib.import_module("wandb")
    except ImportError as error:
        raise ConfigError(
            f"--wandb-project {config.wandb_project} needs the package wandb ({error}): "
            "pip install '.[logging]' in the checkout, or leave the option out"
        ) from error
    folder = config.wandb_save_dir or None
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        project=config.wandb_project,
        name=config.wandb_exp_name or info.save.rstrip("/").rpartition("/")[2] or None,
        entity=config.wandb_entity or None,
        dir=folder,
        config=dict(info.config),
    )
    return WandB(run, config, info)
