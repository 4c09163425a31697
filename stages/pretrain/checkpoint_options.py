"""The options of an instruction tuning that its checkpoint brings: the model and the tokenizer.

No torch, so that a flow can complete a recipe before its first stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainyard import json_text
from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.checkpoint.steps import locate_step, step_document
from trainyard.config import ROLE, leaves, to_dict
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.families import read_model_config
from trainyard.tokenizers.carried import CHAT_TEMPLATE, carried_options

CONFIG, TOKENIZER = "config.json", "tokenizer"
GIVEN_AS = "--load (or --pretrained-checkpoint)"


def complete(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a fine-tuning, by field name: those that are given, --sft and --finetune, and
    for the rest of model and tokenizer those of --load. Raises ConfigError without a checkpoint."""
    load = given.get("load")
    if not isinstance(load, str) or not load:
        raise ConfigError(
            "--load is required: the checkpoint to tune, a run's folder or a step of it (or "
            "--pretrained-checkpoint); stages.reshard converts those of other programs"
        )
    url, _ = locate_step(load, GIVEN_AS)
    options = {"sft": True, "finetune": True, **_model(url, given), **given}
    return {**_tokenizer(url, options), **options}


def of_checkpoint(load: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the model and the tokenizer of a checkpoint of ours, by field name, that are
    not given."""
    url, _ = locate_step(load, GIVEN_AS)
    found = _model(url, given)
    return {**_tokenizer(url, given), **found}


def _model(url: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the checkpoint's model. Its table of positions keeps its length if samples
    become shorter."""
    where = join(url, CONFIG)
    document = step_document(url, CONFIG)
    table = document.get("model") if isinstance(document, dict) else None
    if not isinstance(table, dict):
        raise ArtifactError(f"{where}: describes no model; save the step again")
    model = read_model_config(table, where)
    plain = {name for name, _, field in leaves(type(model)) if ROLE not in field.metadata}
    found = {name: value for name, value in to_dict(model).items() if name in plain}
    found = {name: value for name, value in found.items() if value is not None}
    length = given.get("seq_length", model.seq_length)
    if isinstance(length, int) and length < model.seq_length:
        found["max_position_embeddings"] = model.positions
    return found


def _tokenizer(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint's tokenizer, for conversations if it has a template for them."""
    if "tokenizer_type" in options:
        return {}
    folder = join(url, TOKENIZER)
    found = {name: value for name, value in carried_options(folder).items() if value is not None}
    is_chat = "sft_tokenizer_prompt_format" in options or "chat_template" in options
    if found["tokenizer_type"] == "HuggingFaceTokenizer" and (is_chat or _has_template(folder)):
        found |= {"tokenizer_type": "SFTTokenizer", "sft_tokenizer_prompt_format": "default"}
    return found


def _has_template(folder: str) -> bool:
    if store.exists(join(folder, CHAT_TEMPLATE)):
        return True
    settings = join(folder, "tokenizer_config.json")
    if not store.exists(settings):
        return False
    try:
        document = json_text.loads(store.read_bytes(settings))
    except ValueError as error:
        raise ArtifactError(f"{settings}: not a JSON document: {error}") from None
    return isinstance(document, dict) and bool(document.get("chat_template"))
