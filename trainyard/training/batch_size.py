"""How many micro-batches make up a step. Constant over a run."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The batch of a step: global = micro x dp x num_microbatches."""

    global_batch_size: int
    micro_batch_size: int
    dp: int

    @property
    def num_microbatches(self) -> int:
        """Micro-batches that each rank works through in a step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp)


def constant_batch_size(global_batch_size: int | None, micro_batch_size: int, dp: int) -> BatchSize:
    """The batch size of every step; ConfigError when micro-batches do not fill it evenly."""
    at_once = micro_batch_size * dp
    size = at_once if global_batch_size is None else global_batch_size
    if size % at_once:
        near = sorted({max(1, size // at_once) * at_once, -(-size // at_once) * at_once})
        raise ConfigError(
            f"--global-batch-size ({size}) must be divisible by --micro-batch-size "
            f"({micro_batch_size}) x data-parallel ranks ({dp}) = {at_once}; near it: "
            f"{' or '.join(map(str, near))}"
        )
    return BatchSize(size, micro_batch_size, dp)
