"""The chunks of a run's samples, for the stages of Retro, by the options that decide them."""

from __future__ import annotations

from trainyard.retrieval.pretraining_chunks import ANY, PretrainingChunks
from trainyard.training.loop.length import sample_counts
from trainyard.training.options.samples import RunSamplesConfig


def open_chunks(
    config: RunSamplesConfig, split: str, chunk_length: int, vocab_size: int = ANY
) -> PretrainingChunks:
    """The chunks of the samples that a run takes from a split."""
    sizes, consumed = sample_counts(config)
    return PretrainingChunks.open(
        config.data,
        split,
        seq_length=config.seq_length,
        seed=config.seed,
        sizes=sizes,
        num_consumed=consumed,
        chunk_length=chunk_length,
        vocab_size=vocab_size,
    )
