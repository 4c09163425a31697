"""Hybrids in Megatron-LM's checkpoints: names, rows of every split, arguments of all releases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainyard.conversion.megatron.converted_runs import ROWS, convert_weights, model_in
from tests.trainyard.models.perturbed import perturb
from trainyard.conversion.megatron.args import config_of
from trainyard.conversion.megatron.read import open_megatron
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.init import init_parameters
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.mamba.model import MambaModel
from trainyard.models.moe_config import MoEConfig

SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "hybrid_layer_pattern": "MM*-",
    "mamba_state_dim": 8,
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
    "position_embedding_type": "none",
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "hybrid": {"is_hybrid_model": True, "untie_embeddings_and_output_weights": True},
    "mamba alone": {"hybrid_layer_pattern": "MMMM", "mamba_num_heads": 6},
    "no mamba": {"hybrid_layer_pattern": "*-*-", "swiglu": True},
    "experts": {"hybrid_layer_pattern": "MEM*", "moe": MoEConfig(num_experts=4)},
}


def weights(**options: Any) -> tuple[MambaConfig, dict[str, Tensor]]:
    config = MambaConfig(**(SIZES | options))
    model = MambaModel(config, ROWS)
    init_parameters(model, 3)
    perturb(model, seed=4, scale=1.0)
    return config, {name: tensor.detach() for name, tensor in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_split_is_written_and_read(tmp_path: Path, kind: str, tp: int, pp: int) -> None:
    config, ours = weights(**KINDS[kind])
    with open_megatron(str(convert_weights(tmp_path, config, ours, tp=tp, pp=pp))) as source:
        found = source.config
        assert isinstance(found, MambaConfig)
        for name in (*SIZES, *KINDS[kind]):
            if name != "moe":
                assert getattr(found, name) == getattr(config, name), name
        assert found.experts.num_experts == config.experts.num_experts
        assert found.experts.moe_layer_freq == config.experts.moe_layer_freq
        assert {name.removeprefix("model.") for name in source.specs} == set(ours)
        for name, tensor in ours.items():
            assert torch.equal(source.read(f"model.{name}"), tensor), name


def test_files_have_the_names_and_rows_of_megatron(tmp_path: Path) -> None:
    config, ours = weights(**KINDS["hybrid"])
    model, args = model_in(convert_weights(tmp_path, config, ours, tp=2, pp=2), "01_000")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.items()}
    h, di, gn, heads = 32, 64, 16, 8
    mixer = "decoder.layers.0.mixer."
    assert shapes[f"{mixer}in_proj.weight"] == ((2 * di + 2 * gn + heads) // 2, h)
    assert shapes[f"{mixer}in_proj.layer_norm_weight"] == (h,)
    assert shapes[f"{mixer}conv1d.weight"] == ((di + 2 * gn) // 2, 1, 4)
    assert shapes[f"{mixer}conv1d.bias"] == ((di + 2 * gn) // 2,)
    for name in ("A_log", "D", "dt_bias"):
        assert shapes[f"{mixer}{name}"] == (heads // 2,)
    assert shapes[f"{mixer}norm.weight"] == (di // 2,)
    assert shapes[f"{mixer}out_proj.weight"] == (h, di // 2)
    z, x, b, c, dt = ours[f"{mixer}in_proj.weight"].split([di, di, gn, gn, heads])
    second = torch.cat([part.chunk(2)[1] for part in (z, x, b, c, dt)])
    assert torch.equal(model[f"{mixer}in_proj.weight"], second)
    assert args.hybrid_override_pattern == args.hybrid_layer_pattern == "MM*-"
    assert args.spec == ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]
    assert (args.mamba_state_dim, args.mamba_num_groups, args.is_hybrid_model) == (8, 2, True)
    last, _ = model_in(tmp_path / "made", "01_001")
    assert {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
        "decoder.final_norm.weight",
        "output_layer.weight",
    } < last.keys()


def test_arguments_of_older_scripts_are_read() -> None:
    args = {
        "num_layers": 56,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "seq_length": 4096,
        "position_embedding_type": "none",
        "hybrid_attention_ratio": 0.08,
        "hybrid_mlp_ratio": 0.5,
        "hybrid_override_pattern": None,
        "spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
        "model_type": "mamba",
    }
    config = config_of(args, "args")
    assert isinstance(config, MambaConfig)
    assert [config.count(letter) for letter in "M*-"] == [24, 4, 28]
    assert (config.mamba_heads, config.mamba_num_groups, config.mamba_state_dim) == (128, 8, 128)
    staged = config_of({**args, "hybrid_layer_pattern": "M" * 20 + "|" + "*-" * 18}, "args")
    assert isinstance(staged, MambaConfig)
    assert staged.layer_kinds == "M" * 20 + "*-" * 18
    with pytest.raises(ConfigError, match="--spec"):
        config_of({**args, "spec": ["mine", "spec"]}, "args")
    with pytest.raises(ArtifactError, match="describes no layers"):
        config_of({**args, "hybrid_override_pattern": 7}, "args")
    with pytest.raises(ConfigError, match="hybrid_mlp_ratio"):
        config_of({**args, "model_type": None}, "args")


@pytest.mark.parametrize(
    ("options", "target", "message"),
    [
        ({}, {"transformer_impl": "local"}, "have no layers with --transformer-impl local"),
        ({}, {"model_class": "legacy"}, "the legacy model class of Megatron-LM has no Mamba"),
        ({"mamba_dt_min": 0.1}, {}, "no arguments for --mamba-dt-min"),
        ({}, {"tp": 4}, "blocks of .* rows, each of which must be divisible by 4"),
    ],
)
def test_what_megatron_does_not_have_is_refused(
    tmp_path: Path, options: dict[str, Any], target: dict[str, Any], message: str
) -> None:
    more = {"mamba_num_groups": 2, "mamba_state_dim": 1} if "tp" in target else {}
    config, ours = weights(**options, **more)
    with pytest.raises(ConfigError, match=message):
        convert_weights(tmp_path, config, ours, **target)
