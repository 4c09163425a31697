"""Lines of the log at the start of a run, on rank 0: its data, and what its layout changes."""

from __future__ import annotations

import logging

from trainyard.parallel.dims import ParallelDims
from trainyard.training.loop.data import RunData

log = logging.getLogger(__name__)


def log_data(data: RunData) -> None:
    """Log the samples of each kind of data, and why there is no test loss."""
    valid = "+".join(str(len(dataset)) for _, dataset in data.valid) or "0"
    test = "+".join(str(len(dataset)) for _, dataset in data.test) or "0"
    log.info(
        "data train_samples=%d valid_samples=%s test_samples=%s",
        *(len(data.train), valid, test),
    )
    if data.untested:
        log.info("no test loss at the end: %s", data.untested)


def log_dropout(attention_dropout: float, dims: ParallelDims) -> None:
    """Log that the layout changes the result, where it does."""
    if attention_dropout > 0 and dims.tp * dims.cp > 1:
        log.info(
            "--attention-dropout %g: each rank draws for its own heads and tokens, so "
            "--tensor-model-parallel-size and --context-parallel-size change the result",
            attention_dropout,
        )
