"""A source whose weights are rounded to another number format; states of the optimizer stay."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trainyard.checkpoint.closing import Closing
from trainyard.checkpoint.safetensors.file import DTYPES
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.source import Source, generation_of
from trainyard.errors import ConfigError

FORMATS = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""Names of safetensors, by those of options."""

WEIGHTS, MAIN = "model.", "optimizer.param."


class Cast(Closing):
    """A source with weights of one format; `close` closes the source."""

    def __init__(self, source: Source, number_format: str, *, with_states: bool) -> None:
        """number_format: fp32, bf16 or fp16. with_states: whether states of an optimizer are
        written too. Raises ConfigError if a training goes on from them and the weights themselves,
        which then must not be rounded."""
        dtype = FORMATS[number_format]
        names = [name for name in source.specs if name.startswith(WEIGHTS)]
        has_states = len(names) < len(source.specs)
        has_main = any(name.startswith(MAIN) for name in source.specs)
        rounds = any(source.specs[n].size_bytes > _size(source.specs[n], dtype) for n in names)
        if with_states and rounds and has_states and not has_main:
            raise ConfigError(
                f"--{number_format}: {source.url} has states of an optimizer that updates the "
                "weights themselves, so rounding them would change the training; leave it out, or "
                "write the weights alone with --saver hf, and convert those"
            )
        self._source, self._dtype = source, dtype
        self.url, self.step, self.config = source.url, source.step, source.config
        self.padded_vocab_size, self.vocab_size = source.padded_vocab_size, source.vocab_size
        self.consumed_train_samples = source.consumed_train_samples
        self.num_updates = source.num_updates
        self.generation = generation_of(source)
        for name in ("args", "scheduler", "scaler", "is_legacy"):  # only some formats have them
            if hasattr(source, name):
                setattr(self, name, getattr(source, name))
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(dtype, spec.shape) if name.startswith(WEIGHTS) else spec
            for name, spec in source.specs.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, rounded to the nearest number, ties to even."""
        tensor = self._source.read(name)
        return tensor.to(DTYPES[self._dtype]) if name.startswith(WEIGHTS) else tensor

    def tokenizer_files(self) -> Mapping[str, bytes]:
        """The files of the tokenizer."""
        return self._source.tokenizer_files()

    def close(self) -> None:
        """Close the files."""
        self._source.close()


def _size(spec: TensorSpec, dtype: str) -> int:
    return TensorSpec(dtype, spec.shape).size_bytes
