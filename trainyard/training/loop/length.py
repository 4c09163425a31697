"""How long a run is, and at which steps it looks up. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.training.loop.batch_size import BatchSchedule, build_batch_schedule, run_length
from trainyard.training.options.training import TrainingConfig


@dataclass(frozen=True, slots=True)
class RunLength:
    """A run in steps and samples."""

    steps: int
    """Optimizer steps of the whole run."""
    samples: int
    """Training samples that it asks for."""
    schedule: BatchSchedule
    evaluation_steps: tuple[int, ...]
    """After which the validation loss is measured: the last step is one of them, if any is."""

    @property
    def consumed(self) -> int:
        """Samples that the steps take: more than asked for where the last batch ends behind."""
        return self.schedule.samples_after(self.steps)

    @property
    def global_batch_size(self) -> int:
        """The final one, which validation takes and numbers of iterations count in."""
        return self.schedule.final.global_batch_size


def length_of(training: TrainingConfig, dp: int, seq_length: int) -> RunLength:
    """The length of a run on so many data-parallel ranks; ConfigError where numbers do not fit."""
    schedule = build_batch_schedule(
        global_batch_size=training.global_batch_size,
        micro_batch_size=training.micro_batch_size,
        dp=dp,
        seq_length=seq_length,
        rampup_batch_size=training.rampup_batch_size,
        step_batch_size_schedule=training.step_batch_size_schedule,
        decrease_if_needed=training.decrease_batch_size_if_needed,
    )
    steps, samples = run_length(schedule, training.train_iters, training.train_samples)
    return RunLength(steps, samples, schedule, tuple(training.evaluation_steps(steps)))


def num_samples(training: TrainingConfig, length: RunLength) -> tuple[int, int, int]:
    """Samples of training, validation and test data that a run asks for, by Megatron-LM's count.

    The count decides how many epochs are shuffled together, so it decides the order as well."""
    if not training.eval_iters:
        return length.samples, 0, 0
    by_interval = length.steps // training.eval_interval + 1
    measurements = max(by_interval, len(length.evaluation_steps))
    measurement = training.eval_iters * length.global_batch_size
    return length.samples, measurements * measurement, measurement
