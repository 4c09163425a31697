"""Builds trainyard's tensors from those of another format, one at a time, by recipes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from trainyard.checkpoint.closing import Closing
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.tokenizer_files import Carried
from trainyard.errors import ArtifactError
from trainyard.models.config import TransformerConfig

log = logging.getLogger(__name__)

Make = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class TensorRecipe:
    """How one of our tensors follows from tensors of the other format."""

    sources: tuple[str, ...]
    """Names of the other format's tensors, in the order in which `make` takes them."""
    make: Make


def as_is(parts: Sequence[Tensor]) -> Tensor:
    """The only tensor, unchanged."""
    (tensor,) = parts
    return tensor


class TheirTensors(Protocol):
    """Tensors in another format's files, under that format's names."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Type and shape of each."""

    def read(self, name: str) -> Tensor:
        """A whole tensor, on the CPU."""

    def close(self) -> None:
        """Close the files."""


@dataclass(frozen=True, slots=True)
class About:
    """Information about a model other than its tensors."""

    url: str
    config: TransformerConfig
    padded_vocab_size: int
    tokenizer: Carried
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Generation settings, as in `generation_config.json`; {} without any."""


class AssembledSource(Closing):
    """A source with weights only, without a step."""

    step = 0
    consumed_train_samples = 0
    num_updates = 0

    def __init__(
        self, about: About, recipes: Mapping[str, TensorRecipe], tensors: TheirTensors
    ) -> None:
        """recipes: by our name, without "model.". tensors: must match the recipes; `close` closes
        them."""
        self.url, self.generation = about.url, about.generation
        self.padded_vocab_size = about.padded_vocab_size
        known = about.tokenizer.vocab_size or self.padded_vocab_size
        if known > self.padded_vocab_size:
            log.warning(
                "the tokenizer of %s has %d tokens, but the model has rows for only %d; "
                "the tokens above have no row",
                *(self.url, known, self.padded_vocab_size),
            )
        self.vocab_size = min(known, self.padded_vocab_size)
        self.config = padded_alike(about.config, self.vocab_size, self.padded_vocab_size)
        self._tokenizer, self._tensors = about.tokenizer, tensors
        self._recipes = {f"model.{name}": recipe for name, recipe in recipes.items()}
        theirs = tensors.specs
        self.specs: Mapping[str, TensorSpec] = {
            name: self._spec([theirs[source] for source in recipe.sources], recipe)
            for name, recipe in self._recipes.items()
        }

    def _spec(self, parts: Sequence[TensorSpec], recipe: TensorRecipe) -> TensorSpec:
        """Type and shape, without reading the values."""
        dtypes = sorted({part.dtype for part in parts})
        if len(dtypes) > 1:
            raise ArtifactError(
                f"{self.url}: {', '.join(recipe.sources)} are of types {', '.join(dtypes)}, but "
                "must have one type, as they become one tensor; convert them to one type"
            )
        shape = recipe.make([torch.empty(part.shape, device="meta") for part in parts]).shape
        return TensorSpec(dtypes[0], tuple(shape))

    def read(self, name: str) -> Tensor:
        """A whole tensor; keeps no other in memory."""
        recipe = self._recipes[name]
        made = recipe.make([self._tensors.read(source) for source in recipe.sources])
        return made.contiguous()

    def tokenizer_files(self) -> Mapping[str, bytes]:
        """The tokenizer in the folder of the weights."""
        return self._tokenizer.files

    def close(self) -> None:
        """Close the files."""
        self._tensors.close()


def padded_alike(config: TransformerConfig, vocab_size: int, rows: int) -> TransformerConfig:
    """The configuration that pads `vocab_size` tokens to `rows` rows."""
    if config.padded_vocab_size(vocab_size) == rows:
        return config
    return replace(config, make_vocab_size_divisible_by=rows)
