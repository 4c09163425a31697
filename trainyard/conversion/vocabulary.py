"""A source with another number of vocabulary rows, or another tokenizer.

Rows above the tokens are never used, so they are cut or added to match `padded_vocab_size`: added
weights repeat the last row, as Megatron-LM's converter does, added optimizer states are zero. Rows
of tokens are never cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from trainyard.checkpoint.closing import Closing
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.lazy_tensors import padded_alike
from trainyard.conversion.source import Source, generation_of
from trainyard.conversion.tokenizer_files import Carried
from trainyard.errors import ConfigError

EMBEDDING = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
"""Tensors with a row for each token."""

REPEATED = ("model.", "optimizer.param.")
"""Prefixes of weights; other tensors are states of the optimizer."""


class Adjusted(Closing):
    """A source with another vocabulary; `close` closes the source."""

    def __init__(
        self,
        source: Source,
        *,
        tokenizer: Carried | None = None,
        true_vocab_size: int | None = None,
        divisible_by: int | None = None,
        tensor_parallel_size: int = 1,
    ) -> None:
        """tokenizer: replaces the source's. true_vocab_size: number of tokens, without a tokenizer.
        divisible_by: pad again, to a multiple of this times `tensor_parallel_size`.

        Raises ConfigError for more tokens than rows."""
        self._source, self._tokenizer = source, tokenizer
        self.url, self.step = source.url, source.step
        self.consumed_train_samples = source.consumed_train_samples
        self.num_updates = source.num_updates
        self.generation = generation_of(source)
        for name in ("args", "scheduler", "scaler", "is_legacy"):  # only some formats have them
            if hasattr(source, name):
                setattr(self, name, getattr(source, name))
        self.vocab_size = _tokens(source, tokenizer, true_vocab_size)
        rows, config = source.padded_vocab_size, source.config
        if divisible_by is not None:
            config = replace(config, make_vocab_size_divisible_by=divisible_by)
            rows = config.padded_vocab_size(self.vocab_size, tensor_parallel_size)
        self.config = config if divisible_by else padded_alike(config, self.vocab_size, rows)
        self.padded_vocab_size = rows
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(spec.dtype, (rows, *spec.shape[1:])) if has_rows(name) else spec
            for name, spec in source.specs.items()
        }

    @property
    def source(self) -> Source:
        """The original source."""
        return self._source

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        tensor = self._source.read(name)
        if not has_rows(name):
            return tensor
        added = self.padded_vocab_size - len(tensor)
        if added <= 0:
            return tensor[: self.padded_vocab_size].contiguous()
        last = tensor[-1:].expand(added, *tensor.shape[1:])
        return torch.cat([tensor, last if name.startswith(REPEATED) else torch.zeros_like(last)])

    def tokenizer_files(self) -> Mapping[str, bytes]:
        """The files of the tokenizer."""
        if self._tokenizer is not None:
            return self._tokenizer.files
        return self._source.tokenizer_files()

    def close(self) -> None:
        """Close the files."""
        self._source.close()


def has_rows(name: str) -> bool:
    """Whether a tensor, by its global name, has a row for each token."""
    return name.endswith(tuple(f".{ending}" for ending in EMBEDDING))


def _tokens(source: Source, tokenizer: Carried | None, true_vocab_size: int | None) -> int:
    found = tokenizer.vocab_size if tokenizer is not None else None
    if None not in (found, true_vocab_size) and found != true_vocab_size:
        raise ConfigError(
            f"--true-vocab-size {true_vocab_size}, but the tokenizer has {found} tokens; leave the "
            "option out"
        )
    tokens = true_vocab_size or found or source.vocab_size
    if tokens > source.padded_vocab_size:
        option = "--true-vocab-size" if true_vocab_size else "the tokenizer"
        raise ConfigError(
            f"{option}: {tokens} tokens, but {source.url} has rows for {source.padded_vocab_size}; "
            "this is not the tokenizer that the model was trained with"
        )
    return tokens
