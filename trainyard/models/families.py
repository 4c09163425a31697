"""The table of model families.

To add one: a folder like `gpt/` with its options, module, samples, costs and checkpoint names, a
row here, and its name in `ModelType`. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainyard.config import from_dict, one_of
from trainyard.errors import ConfigError
from trainyard.models.bert.family import BERT
from trainyard.models.config import TransformerConfig
from trainyard.models.family import ModelFamily
from trainyard.models.gpt.family import GPT
from trainyard.models.mamba.family import MAMBA
from trainyard.models.retro.family import RETRO
from trainyard.models.t5.family import T5

FAMILIES: dict[str, ModelFamily] = {
    "gpt": GPT,
    "bert": BERT,
    "t5": T5,
    "retro": RETRO,
    "mamba": MAMBA,
}
"""By --model-type; a document without it is a GPT's."""

MODEL_OPTIONS = one_of(
    "model_type",
    {name: f.config for name, f in FAMILIES.items()},
    **{name: f"--model-type {name} (pretrain_{name}.py)" for name in FAMILIES},
)
"""Metadata of a field with the options of a model of any family."""


def family_of(config: TransformerConfig) -> ModelFamily:
    """The family whose options these are."""
    return next(family for family in FAMILIES.values() if family.config is type(config))


def read_model_config(table: Mapping[str, Any], where: str) -> TransformerConfig:
    """The options in the `model` table of a checkpoint's config.json. Those of a checkpoint from
    before there were families name none and are a GPT's. Raises ConfigError, naming `where`."""
    name = table.get("model_type", "gpt")
    if name not in FAMILIES:
        known = ", ".join(map(repr, FAMILIES))
        raise ConfigError(f"{where}: model_type is {name!r}; known are {known}")
    return from_dict(FAMILIES[name].config, table, where)
