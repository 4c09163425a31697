"""Loads a model, its configuration and its tokenizer from a checkpoint alone (--load)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from trainyard.checkpoint.layout import refuse_differences, slices_held
from trainyard.checkpoint.load import Checkpoint, open_checkpoint, restore
from trainyard.checkpoint.model_config import model_config
from trainyard.errors import ConfigError
from trainyard.models.config import TransformerConfig
from trainyard.models.families import FAMILIES, family_of
from trainyard.parallel.device import check_memory
from trainyard.tokenizers.base import Tokenizer
from trainyard.tokenizers.registry import load_tokenizer

SCORERS = tuple(name for name, family in FAMILIES.items() if family.predicts_next)
"""Families that predict the next token; a Retro without neighbours is the GPT of its decoder."""
WRITERS = tuple(name for name, family in FAMILIES.items() if family.generates)
"""Families of models that generate text."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a tool needs of a trained model."""

    model: Any
    """The module in evaluation mode, with the weights of the checkpoint."""
    config: TransformerConfig
    tokenizer: Tokenizer
    step: int
    checkpoint: Checkpoint


def load_model(
    url: str,
    device: torch.device | str = "cpu",
    *,
    option: str = "--load",
    model_type: str | tuple[str, ...] | None = None,
) -> LoadedModel:
    """The model of a step folder, or of the latest step of a run folder.

    model_type: the family that it must be of, or several; unset: any. Raises ConfigError, which
    names `option`, if it is of another, or if there is no checkpoint."""
    checkpoint = open_checkpoint(url, option)
    config, padded_vocab_size = model_config(checkpoint)
    wanted = (model_type,) if isinstance(model_type, str) else model_type
    if wanted is not None and config.model_type not in wanted:
        checkpoint.close()
        does = "writes text" if wanted == WRITERS else "predicts the next token"
        raise ConfigError(
            f"{option} {url} holds a {config.model_type}, and this needs a {wanted[0]}, which "
            f"{does}; name another checkpoint"
        )
    check_tensors(checkpoint, config, padded_vocab_size)
    count = config.num_params(padded_vocab_size)
    check_memory(
        f"{option} {url}: the weights of its {count:,} parameters take",
        count * torch.get_default_dtype().itemsize,
        torch.device(device),
        "take a machine with more",
    )
    with torch.device(device):
        tokens = _tokens(checkpoint, padded_vocab_size)
        model = family_of(config).load_class()(config, padded_vocab_size, true_vocab_size=tokens)
    targets = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    restore(checkpoint, targets, "model.")
    checkpoint.close()
    return LoadedModel(
        model.eval(),
        config,
        checkpoint_tokenizer(checkpoint),
        checkpoint.step,
        checkpoint,
    )


def check_tensors(
    checkpoint: Checkpoint, config: TransformerConfig, padded_vocab_size: int
) -> None:
    """Refuse tensors that do not match the configuration, before memory is allocated for them."""
    held = {name: checkpoint.spec(name) for name in checkpoint.names("model.")}
    if sum(math.prod(spec.shape) for spec in held.values()) == config.num_params(padded_vocab_size):
        return
    with torch.device("meta"):
        model = family_of(config).load_class()(config, padded_vocab_size)
    wanted = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    shards = {name: slices_held(name, tensor) for name, tensor in wanted.items()}
    refuse_differences(checkpoint.url, held, shards, "model.")


def _tokens(checkpoint: Checkpoint, padded_vocab_size: int) -> int:
    """Tokens of the vocabulary: all rows, unless the checkpoint says that some are padding."""
    found = checkpoint.config.get("vocab_size")
    return min(found, padded_vocab_size) if type(found) is int else padded_vocab_size


def checkpoint_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that a checkpoint carries."""
    checkpoint.require_tokenizer()
    return load_tokenizer(checkpoint.tokenizer_url)
