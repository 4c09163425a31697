"""How many samples a run asks for. No torch: what builds indices ahead asks the same."""

from __future__ import annotations

from trainyard.training.config import TrainingConfig


def num_samples(training: TrainingConfig, global_batch_size: int) -> tuple[int, int]:
    """Samples of training and validation data that a run asks for, by Megatron-LM's count.

    The count decides how many epochs are shuffled together, so it decides the order as well."""
    if not training.eval_iters:
        return training.train_iters * global_batch_size, 0
    by_interval = training.train_iters // training.eval_interval + 1
    measurements = max(by_interval, len(training.evaluation_steps()))
    return (
        training.train_iters * global_batch_size,
        measurements * training.eval_iters * global_batch_size,
    )
