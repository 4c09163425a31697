"""A GPT from a checkpoint alone: model, configuration and tokenizer, for tools that take --load."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.checkpoint.load import Checkpoint, open_checkpoint, restore
from trainyard.checkpoint.steps import CONFIG
from trainyard.config import from_dict
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.config import GPTConfig
from trainyard.models.gpt import GPTModel
from trainyard.tokenizers.base import Tokenizer
from trainyard.tokenizers.registry import load_tokenizer


@dataclass(frozen=True, slots=True)
class LoadedGPT:
    """What a tool needs of a trained model."""

    model: GPTModel
    """In evaluation mode, weights of the checkpoint."""
    config: GPTConfig
    tokenizer: Tokenizer
    step: int
    checkpoint: Checkpoint


def gpt_config(checkpoint: Checkpoint) -> tuple[GPTConfig, int]:
    """The configuration of the model in a checkpoint, and its padded vocabulary size."""
    url = join(checkpoint.url, CONFIG)
    document = checkpoint.config
    other = document.get("provided", {}).get("model_provider")
    if other is not None:
        raise ArtifactError(
            f"{checkpoint.url} holds a model that a program brought along ({other}), not a GPT; "
            "open_checkpoint reads its tensors by name"
        )
    padded = document.get("padded_vocab_size")
    if not isinstance(document.get("model"), dict) or type(padded) is not int:
        raise ArtifactError(f"{url}: has no 'model' table and 'padded_vocab_size'; not a GPT")
    try:
        return from_dict(GPTConfig, document["model"], f"{url}: model"), padded
    except ConfigError as error:
        raise ArtifactError(f"{error}; the checkpoint was made by another version") from error


def load_gpt(url: str, device: torch.device | str = "cpu", *, option: str = "--load") -> LoadedGPT:
    """The model at a step folder, or at the latest step of a run folder.

    Raises ConfigError, naming `option`, when there is no checkpoint."""
    checkpoint = open_checkpoint(url, option)
    config, padded_vocab_size = gpt_config(checkpoint)
    with torch.device(device):
        tokens = _tokens(checkpoint, padded_vocab_size)
        model = GPTModel(config, padded_vocab_size, true_vocab_size=tokens)
    targets = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    restore(checkpoint, targets, "model.")
    checkpoint.close()
    return LoadedGPT(
        model.eval(),
        config,
        checkpoint_tokenizer(checkpoint),
        checkpoint.step,
        checkpoint,
    )


def _tokens(checkpoint: Checkpoint, padded_vocab_size: int) -> int:
    """Tokens of the vocabulary: all rows, unless the checkpoint knows that some only pad it."""
    found = checkpoint.config.get("vocab_size")
    return min(found, padded_vocab_size) if type(found) is int else padded_vocab_size


def checkpoint_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that a checkpoint carries."""
    if not store.list_files(checkpoint.tokenizer_url):
        raise ArtifactError(f"{checkpoint.url}: carries no tokenizer; its trainer left it out")
    return load_tokenizer(checkpoint.tokenizer_url)
