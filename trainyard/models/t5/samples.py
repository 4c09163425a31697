"""How sentences become the samples of a T5."""

from __future__ import annotations

from trainyard.datasets.masked.t5 import T5Format
from trainyard.models.family import SampleOptions
from trainyard.models.t5.config import T5Config


def sample_format(config: T5Config, options: SampleOptions) -> T5Format:
    """The format that the options describe."""
    return T5Format.of(
        options.tokenizer,
        options.masked,
        config.seq_length,
        config.decoder_length,
        options.seed,
    )
