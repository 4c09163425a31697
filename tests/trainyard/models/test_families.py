"""The table of model families keeps what `ModelFamily` promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainyard.config import to_dict
from trainyard.errors import ConfigError
from trainyard.models.families import FAMILIES, family_of, read_model_config
from trainyard.models.parallel_layout import ParallelLayout

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8}
MORE: dict[str, dict[str, Any]] = {
    "retro": {"retro_chunk_length": 4, "retro_cross_attention_layers": (2,)},
    "mamba": {"mamba_head_dim": 4, "mamba_state_dim": 4, "hybrid_layer_pattern": "M-"},
}
"""Of families whose default sizes are larger."""
ROWS = 128

every_family = pytest.mark.parametrize("name", FAMILIES)


def options(name: str) -> dict[str, Any]:
    return {**SIZES, **MORE.get(name, {})}


@every_family
def test_a_family_is_found_by_its_options_and_builds_their_model(name: str) -> None:
    family = FAMILIES[name]
    config = family.config(**options(name))
    assert family_of(config) is family
    with torch.device("meta"):
        model = family.load_class()(config, ROWS)
    assert isinstance(model, nn.Module)
    assert model.config is config
    assert callable(model.forward_step)
    assert sum(p.numel() for p in model.parameters()) == config.num_params(ROWS)


@every_family
def test_a_family_knows_its_costs(name: str) -> None:
    family = FAMILIES[name]
    config = family.config(**options(name))
    assert family.flops_per_iteration(config, ROWS, 2) == 2 * family.flops_per_iteration(
        config, ROWS, 1
    )
    whole, halves = (family.shard_params(config, ROWS, ParallelLayout(tp=tp)) for tp in (1, 2))
    assert halves < whole
    full = family.activation_bytes(config, ROWS, ParallelLayout(recompute="full"))
    assert 0 < full < family.activation_bytes(config, ROWS, ParallelLayout())


@every_family
def test_a_checkpoints_model_table_is_read_as_its_family(name: str) -> None:
    config = FAMILIES[name].config(**options(name))
    assert config.model_type == name
    assert read_model_config(to_dict(config), "config.json") == config


def test_options_of_a_family_say_no_other() -> None:
    with pytest.raises(ConfigError, match="--model-type bert: these are the options of gpt"):
        FAMILIES["gpt"].config(**SIZES, model_type="bert")


def test_an_unknown_model_table_is_refused() -> None:
    assert read_model_config(SIZES, "config.json") == FAMILIES["gpt"].config(**SIZES)
    with pytest.raises(ConfigError, match=r"config\.json: model_type is 'eliza'; known are 'gpt'"):
        read_model_config({**SIZES, "model_type": "eliza"}, "config.json")
    with pytest.raises(ConfigError, match=r"config\.json: unknown key 'experts'"):
        read_model_config({**SIZES, "experts": 8}, "config.json")
