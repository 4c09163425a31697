"""How many samples a run takes from each split. Standard library only."""

from __future__ import annotations


def split_sizes(
    samples: int,
    steps: int,
    *,
    eval_interval: int,
    eval_iters: int,
    global_batch_size: int,
    measurements: int = 0,
) -> tuple[int, int, int]:
    """Samples of training, validation and test data, by Megatron-LM's count.

    measurements: validations of the run, if they may be more than its steps suggest. The count
    decides how many epochs are shuffled together, and so the order of samples."""
    if not eval_iters:
        return samples, 0, 0
    measurement = eval_iters * global_batch_size
    return samples, max(steps // eval_interval + 1, measurements) * measurement, measurement
