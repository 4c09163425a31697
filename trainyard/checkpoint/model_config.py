"""The configuration of the model in a step, read from its config.json. No torch."""

from __future__ import annotations

from typing import Any

from trainyard.artifacts.urls import join
from trainyard.checkpoint.bounds import check_model
from trainyard.checkpoint.steps import CONFIG
from trainyard.checkpoint.stored_step import StoredStep
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.config import TransformerConfig
from trainyard.models.families import read_model_config


def check_model_config(step: StoredStep[Any]) -> None:
    """Raise ArtifactError for a config.json that no reader would accept.

    Steps of a user's own program may have none, or one of their own."""
    if step.manifest.record(CONFIG) is None or "padded_vocab_size" not in step.config:
        return
    if step.config.get("provided", {}).get("model_provider") is None:
        model_config(step)


def model_config(checkpoint: StoredStep[Any]) -> tuple[TransformerConfig, int]:
    """The configuration of the model in a checkpoint, and its padded vocabulary size."""
    url = join(checkpoint.url, CONFIG)
    document = checkpoint.config
    other = document.get("provided", {}).get("model_provider")
    if other is not None:
        raise ArtifactError(
            f"{checkpoint.url} holds a model of a user's program ({other}), of no family here; "
            "open_checkpoint reads its tensors by name"
        )
    padded = document.get("padded_vocab_size")
    if not isinstance(document.get("model"), dict) or type(padded) is not int:
        raise ArtifactError(f"{url}: has no 'model' table and 'padded_vocab_size'; not a model")
    try:
        config = read_model_config(document["model"], f"{url}: model")
        check_model(config, padded, len(checkpoint.names("model.")), url)
        return config, padded
    except ConfigError as error:
        message = str(error) if str(error).startswith(url) else f"{url}: {error}"
        raise ArtifactError(f"{message}; another version made this checkpoint") from error
