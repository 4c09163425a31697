"""What options and the number of ranks say about each other, told before any work: before inputs
are looked at, ranks are started, or torch is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainyard.optim.schedule import build_schedule
from trainyard.parallel.dims import dims_of
from trainyard.training.loop.length import length_of

if TYPE_CHECKING:
    from stages.pretrain.config import PretrainConfig


def check_ranks(config: PretrainConfig, world_size: int | None) -> None:
    """Refuse degrees that do not multiply to the ranks, batches that these do not fill, and a
    schedule of rates that does not fit the length that follows. world_size: unset: unknown."""
    dims = dims_of(config.parallel, world_size or config.parallel.model_ranks)
    length = length_of(config.training, dims.dp, config.model.seq_length)
    training = config.training
    build_schedule(
        config.optimizer, training.train_iters, length.global_batch_size, training.train_samples
    )
