"""The decoder of a Retro as a GPT: its weights without encoder and cross attention, which is what a
Retro computes without neighbours."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trainyard.checkpoint.closing import Closing
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.source import Source, generation_of, model_shapes
from trainyard.errors import ConfigError
from trainyard.models.retro.config import RetroConfig

PREFIX = "model."


class RetroDecoder(Closing):
    """A source with the weights of a GPT alone; `close` closes the Retro."""

    def __init__(self, source: Source) -> None:
        """Raises ConfigError for a model that is no Retro, or whose decoder is no GPT."""
        if not isinstance(source.config, RetroConfig):
            raise ConfigError(
                f"--decoder-only: {source.url} holds a {source.config.model_type}; only a retro "
                "has a decoder to take out, so leave it out"
            )
        if source.config.retro_no_final_layernorm:
            raise ConfigError(
                f"--decoder-only: the Retro at {source.url} has no norm after its last layer "
                "(--retro-no-final-layernorm), which every GPT has; use the Retro without "
                "neighbours instead, as it is"
            )
        self._source = source
        self.url, self.step = source.url, source.step
        self.config = source.config.decoder()
        self.padded_vocab_size, self.vocab_size = source.padded_vocab_size, source.vocab_size
        self.consumed_train_samples, self.num_updates = source.consumed_train_samples, 0
        self.generation = generation_of(source)
        names = model_shapes(self.config, self.padded_vocab_size)
        self.specs: Mapping[str, TensorSpec] = {
            f"{PREFIX}{name}": source.specs[f"{PREFIX}{name}"] for name in names
        }

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        return self._source.read(name)

    def tokenizer_files(self) -> Mapping[str, bytes]:
        """The files of the tokenizer."""
        return self._source.tokenizer_files()

    def close(self) -> None:
        """Close the files."""
        self._source.close()
