"""A model in somebody else's files, told in our names: what every reader of a format offers.

`foreign.into` writes a source as a step of ours, whatever the format; a reader only says what lies
where. Names and layouts are those of `GPTModel`'s tensors: queries, keys and values of a group side
by side, gate above up in `linear_fc1`, embeddings that are tied given once, the vocabulary padded
to `padded_vocab_size` rows."""

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
from trainyard.models.gpt.config import GPTConfig


class Source(Protocol):
    """Use as a context manager, or `close` when the tensors are read.

    A reader raises ArtifactError for damaged files and ConfigError for a model that ours does not
    compute, both before the first tensor is asked for."""

    @property
    def url(self) -> str:
        """Where it lies, for messages."""

    @property
    def config(self) -> GPTConfig:
        """The model."""

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""

    @property
    def vocab_size(self) -> int:
        """Tokens that the tokenizer knows; `padded_vocab_size` where the source does not say."""

    @property
    def step(self) -> int:
        """Training steps done; 0: weights alone ("release")."""

    @property
    def consumed_train_samples(self) -> int:
        """Samples seen; 0 where the source does not say."""

    @property
    def num_updates(self) -> int:
        """Updates that the optimizer made; 0 without its states."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Type and shape by global name: "model.NAME", and where the source keeps the optimizer
        "optimizer.KIND.NAME" (`param`, `exp_avg`, `exp_avg_sq`)."""

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU, contiguous; holds the memory of one tensor at a time."""

    def tokenizer_files(self) -> Mapping[str, bytes]:
        """The files of the tokenizer as a checkpoint carries them in tokenizer/, by their names
        there; {} where there are none."""

    def close(self) -> None:
        """Let the files go."""

    def __enter__(self) -> Self:
        """The source itself."""

    def __exit__(self, *exc_info: object) -> None:
        """Close it."""


def generation_of(source: Source) -> Mapping[str, Any]:
    """How text is to be made with a model (its `generation_config.json`), where its format says so,
    in an attribute `generation`; {} otherwise."""
    found: Mapping[str, Any] = getattr(source, "generation", {})
    return found


# --- expected tensors -------------------------------------------------------------------------


Shapes = Mapping[str, Sequence[int]]

MAX_NAME = 300
"""Letters of a line of the list."""


def model_shapes(config: TransformerConfig, padded_vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model, by its name there; no memory is taken."""
    with torch.device("meta"):
        model = family_of(config).load_class()(config, padded_vocab_size)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def refuse_differences(held: Shapes, wanted: Shapes, url: str, told_by: str) -> None:
    """Refuse tensors that are not those that `told_by` asks for."""
    missing = [_plain(name) for name in sorted(set(wanted) - set(held))]
    unexpected = [_plain(name) for name in sorted(set(held) - set(wanted))]
    differing = [
        _plain(f"{name} is {shown(list(held[name]))}, wanted {list(wanted[name])}")
        for name in sorted(set(wanted) & set(held))
        if tuple(held[name]) != tuple(wanted[name])
    ]
    lists = (
        listed("missing", missing)
        + listed("unexpected", unexpected)
        + listed("of another shape", differing)
    )
    if lists:
        raise ArtifactError(f"{url}: its tensors are not those that {told_by} asks for{lists}")


def _plain(name: str) -> str:
    """As a terminal may show it: names are what a file says."""
    return name if name.isprintable() and len(name) <= MAX_NAME else shown(name)
