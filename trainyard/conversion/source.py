"""The interface of all readers: a model in another program's files, under trainyard's names.

`write_native` writes any source as a trainyard step. Names and layouts are those of `GPTModel`'s
tensors: queries, keys and values of a group together, gate above up in `linear_fc1`, tied
embeddings once, the vocabulary padded to `padded_vocab_size` rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import torch

from trainyard.artifacts.strict_json import shown
from trainyard.checkpoint.layout import listed
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.errors import ArtifactError
from trainyard.models.config import TransformerConfig
from trainyard.models.families import family_of


class Source(Protocol):
    """Use as a context manager, or call `close` after reading.

    A reader raises ArtifactError for damaged files and ConfigError for an unsupported model, both
    before it reads the first tensor."""

    @property
    def url(self) -> str:
        """Its URL, for messages."""

    @property
    def config(self) -> TransformerConfig:
        """The model."""

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the tokenizer; `padded_vocab_size` if the source does not say."""

    @property
    def step(self) -> int:
        """Training steps done; 0 for weights without a training state ("release")."""

    @property
    def consumed_train_samples(self) -> int:
        """Samples consumed; 0 if the source does not say."""

    @property
    def num_updates(self) -> int:
        """Updates of the optimizer; 0 without its states."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Type and shape by global name: "model.NAME", and with optimizer states
        "optimizer.KIND.NAME" (`param`, `exp_avg`, `exp_avg_sq`)."""

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU, contiguous; keeps no other tensor in memory."""

    def tokenizer_files(self) -> Mapping[str, bytes]:
        """The tokenizer's files by their names in tokenizer/ of a checkpoint; {} without one."""

    def close(self) -> None:
        """Close the files."""

    def __enter__(self) -> Self:
        """The source itself."""

    def __exit__(self, *exc_info: object) -> None:
        """Close it."""


def generation_of(source: Source) -> Mapping[str, Any]:
    """The generation settings of a model (`generation_config.json`), from the attribute
    `generation` of sources that have it; {} otherwise."""
    found: Mapping[str, Any] = getattr(source, "generation", {})
    return found


# --- expected tensors -------------------------------------------------------------------------


Shapes = Mapping[str, Sequence[int]]

MAX_NAME = 300
"""Longest name, in characters, that a message prints as it is."""


def model_shapes(config: TransformerConfig, padded_vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model, by its name there; allocates no memory."""
    with torch.device("meta"):
        model = family_of(config).load_class()(config, padded_vocab_size)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def refuse_differences(found: Shapes, wanted: Shapes, url: str, required_by: str) -> None:
    """Raise ArtifactError if the found tensors are not the wanted ones.

    required_by: what the wanted ones follow from, for the message."""
    missing = [_plain(name) for name in sorted(set(wanted) - set(found))]
    unexpected = [_plain(name) for name in sorted(set(found) - set(wanted))]
    differing = [
        _plain(f"{name} is {shown(list(found[name]))}, wanted {list(wanted[name])}")
        for name in sorted(set(wanted) & set(found))
        if tuple(found[name]) != tuple(wanted[name])
    ]
    lists = (
        listed("missing", missing)
        + listed("unexpected", unexpected)
        + listed("of another shape", differing)
    )
    if lists:
        raise ArtifactError(f"{url}: its tensors are not those that {required_by} requires{lists}")


def _plain(name: str) -> str:
    """A name from a file, safe for a terminal."""
    return name if name.isprintable() and len(name) <= MAX_NAME else shown(name)
