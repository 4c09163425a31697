"""How documents become the samples of a GPT."""

from __future__ import annotations

from trainyard.datasets import sample_format as samples
from trainyard.models.family import SampleOptions
from trainyard.models.gpt.config import GPTConfig


def sample_format(config: GPTConfig, options: SampleOptions) -> samples.SampleFormat:
    """The format that the options describe."""
    return samples.sample_format(options.data, options.tokenizer, config.seq_length, options.seed)
