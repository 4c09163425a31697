"""Length of a run in steps and samples, and its validation steps. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.config import MAX_SAMPLES, MAX_STEPS
from trainyard.datasets.split_sizes import split_sizes
from trainyard.errors import ConfigError
from trainyard.optim.config import OptimizerConfig
from trainyard.optim.schedule import OptimizerSchedule, build_optimizer_schedule
from trainyard.training.loop.batch_size import (
    BatchSizeSchedule,
    build_batch_size_schedule,
    run_length,
)
from trainyard.training.options.samples import RunSamplesConfig
from trainyard.training.options.training import TrainingConfig


@dataclass(frozen=True, slots=True)
class RunLength:
    """A run in steps and samples."""

    steps: int
    """Optimizer steps of the whole run."""
    samples: int
    """Training samples of the options."""
    batch_size_schedule: BatchSizeSchedule
    evaluation_steps: tuple[int, ...]
    """Steps after which validation runs; the last step is one of them, if any is."""

    @property
    def consumed(self) -> int:
        """Samples that the steps consume; the last batch may exceed `samples`."""
        return self.batch_size_schedule.samples_after(self.steps)

    @property
    def global_batch_size(self) -> int:
        """The final size, which validation uses, and in which iterations are counted."""
        return self.batch_size_schedule.final.global_batch_size


def length_of(training: TrainingConfig, dp: int, seq_length: int) -> RunLength:
    """The length of a run on `dp` data-parallel ranks; ConfigError if the numbers do not fit."""
    batch_size_schedule = build_batch_size_schedule(
        global_batch_size=training.global_batch_size,
        micro_batch_size=training.micro_batch_size,
        dp=dp,
        seq_length=seq_length,
        rampup_batch_size=training.rampup_batch_size,
        step_batch_size_schedule=training.step_batch_size_schedule,
        decrease_if_needed=training.decrease_batch_size_if_needed,
    )
    steps, samples = run_length(batch_size_schedule, training.train_iters, training.train_samples)
    if steps > MAX_STEPS or samples > MAX_SAMPLES:
        raise ConfigError(
            f"the run has {steps} steps and {samples} samples, the limits are {MAX_STEPS} and "
            f"{MAX_SAMPLES}; lower --train-iters, --train-samples or --global-batch-size"
        )
    return RunLength(steps, samples, batch_size_schedule, tuple(training.evaluation_steps(steps)))


def optimizer_schedule_of(
    config: OptimizerConfig, training: TrainingConfig, length: RunLength
) -> OptimizerSchedule:
    """Learning rate and weight decay over a run; ConfigError if their lengths do not fit it."""
    return build_optimizer_schedule(
        config,
        training.train_iters,
        length.global_batch_size,
        training.train_samples,
        length.batch_size_schedule.samples_after,
    )


def num_samples(training: TrainingConfig, length: RunLength) -> tuple[int, int, int]:
    """Samples of training, validation and test data for a run."""
    return split_sizes(
        length.samples,
        length.steps,
        eval_interval=training.eval_interval,
        eval_iters=training.eval_iters,
        global_batch_size=length.global_batch_size,
        measurements=len(length.evaluation_steps),
    )


def sample_counts(config: RunSamplesConfig) -> tuple[tuple[int, int, int], int]:
    """Samples of training, validation and test data, and training samples of all steps."""
    training = config.training()
    length = length_of(training, 1, config.seq_length)
    return num_samples(training, length), length.consumed
