"""How many samples a run asks for. No torch: what builds indices ahead asks the same."""

from __future__ import annotations

from trainyard.training.loop.length import RunLength
from trainyard.training.options.training import TrainingConfig


def num_samples(training: TrainingConfig, length: RunLength) -> tuple[int, int, int]:
    """Samples of training, validation and test data that a run asks for, by Megatron-LM's count.

    The count decides how many epochs are shuffled together, so it decides the order as well."""
    if not training.eval_iters:
        return length.samples, 0, 0
    by_interval = length.steps // training.eval_interval + 1
    measurements = max(by_interval, len(length.evaluation_steps))
    measurement = training.eval_iters * length.global_batch_size
    return length.samples, measurements * measurement, measurement
