"""The table of model families.

To add one: a folder like `gpt/` with its options, module, costs and checkpoint names, and a row
here. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainyard.config import from_dict
from trainyard.models.config import TransformerConfig
from trainyard.models.family import ModelFamily
from trainyard.models.gpt.family import GPT

FAMILIES: dict[str, ModelFamily] = {"gpt": GPT}


def family_of(config: TransformerConfig) -> ModelFamily:
    """The family whose options these are."""
    return next(family for family in FAMILIES.values() if family.config is type(config))


def read_model_config(table: Mapping[str, Any], where: str) -> TransformerConfig:
    """The options in the `model` table of a checkpoint's config.json, which names no family and so
    is a GPT's. Raises ConfigError, naming `where`."""
    return from_dict(FAMILIES["gpt"].config, table, where)
