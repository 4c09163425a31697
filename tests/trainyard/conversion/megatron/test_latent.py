"""Multi-latent attention, multi-token prediction and gpt-oss in Megatron core's files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainyard.checkpoint.samples import PADDED_VOCAB, random_gpt, save_gpt
from tests.trainyard.conversion.megatron.converted_runs import convert, trees
from trainyard.checkpoint.load import open_checkpoint
from trainyard.conversion.megatron.args import config_of
from trainyard.conversion.megatron.read import open_megatron
from trainyard.errors import ConfigError
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.latent_config import LatentConfig
from trainyard.models.moe_config import MoEConfig
from trainyard.models.mtp_config import MTPConfig

COMMON: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "untie_embeddings_and_output_weights": True,
}
LATENT = GPTConfig(
    **COMMON,
    swiglu=True,
    disable_bias_linear=True,
    qk_layernorm=True,
    yarn_rotary_scaling_factor=4.0,
    yarn_mscale_all_dim=0.7,
    mla=LatentConfig(
        multi_latent_attention=True,
        q_lora_rank=12,
        kv_lora_rank=8,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=6,
    ),
    prediction=MTPConfig(mtp_num_layers=1, mtp_loss_scaling_factor=0.3),
)
EXPERTS = MoEConfig(
    num_experts=4,
    moe_ffn_hidden_size=24,
    moe_layer_freq="[0,1]",
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_shared_expert_intermediate_size=16,
)
CONFIGS = {
    "latent": LATENT,
    "queries of tokens": replace(LATENT, mla=replace(LATENT.mla, q_lora_rank=None)),
    "tied": replace(LATENT, untie_embeddings_and_output_weights=False),
    "deepseek": replace(LATENT, moe=EXPERTS),
    "gpt-oss": GPTConfig(
        **COMMON,
        quick_geglu=True,
        activation_func_clamp_value=7.0,
        glu_linear_offset=1.0,
        softmax_type="learnable",
        window_size="7,0",
        window_attn_skip_freq="2",
        moe=MoEConfig(num_experts=4, moe_ffn_hidden_size=24),
    ),
}
LOCAL: dict[str, Any] = {"transformer_impl": "local"}


def written(config: GPTConfig, tmp_path: Path, **options: Any) -> dict[str, torch.Tensor]:
    """The parameters of a model whose checkpoint was converted to `made`."""
    model = random_gpt(config)
    save_gpt(str(tmp_path / "run"), model)
    with open_checkpoint(str(tmp_path / "run")) as checkpoint:
        convert(checkpoint, tmp_path / "made", **options)
    return model.state_dict()


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", ["latent", "gpt-oss"])
def test_what_is_written_reads_back(name: str, tmp_path: Path) -> None:
    read_back(name, {"tp": 2, "pp": 2}, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, LOCAL, {"pp": 2}, {"tp": 2, "pp": 2, "ep": 2}], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_layout_reads_back(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    if options.get("ep") and not CONFIGS[name].experts.enabled:
        options = {**options, "ep": 1}
    read_back(name, options, tmp_path)


def read_back(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    state = written(CONFIGS[name], tmp_path, **options)
    with open_megatron(str(tmp_path / "made")) as source:
        found, config = source.config, CONFIGS[name]
        assert (found.latent, found.mtp, found.activation) == (
            *(config.latent, config.mtp, config.activation),
        )
        assert found.attention_scale == config.attention_scale
        assert found.activation_func_clamp_value == config.activation_func_clamp_value
        assert source.specs.keys() == {f"model.{key}" for key in state}
        for key, tensor in state.items():
            assert torch.equal(source.read(f"model.{key}"), tensor), key


def test_names_shapes_and_ranks_are_megatron_lms(tmp_path: Path) -> None:
    written(LATENT, tmp_path, tp=2, pp=2)
    last = trees(tmp_path / "made", "iter_0000050")["mp_rank_01_001"]["model"]
    attention = {
        "linear_q_down_proj.weight": (12, 32),
        "linear_q_up_proj.layer_norm_weight": (12,),
        "linear_q_up_proj.weight": (2 * 12, 12),
        "linear_kv_down_proj.weight": (8 + 4, 32),
        "linear_kv_up_proj.layer_norm_weight": (8,),
        "linear_kv_up_proj.weight": (2 * 14, 8),
        "linear_proj.weight": (32, 2 * 6),
    }
    layer = {
        "input_layernorm.weight": (32,),
        **{f"self_attention.{name}": shape for name, shape in attention.items()},
        "mlp.linear_fc1.layer_norm_weight": (32,),
        "mlp.linear_fc1.weight": (LATENT.ffn_size, 32),
        "mlp.linear_fc2.weight": (32, LATENT.ffn_size // 2),
    }
    joins = {"enorm.weight": (32,), "hnorm.weight": (32,), "eh_proj.weight": (16, 64)}
    depth = joins | {f"transformer_layer.{name}": shape for name, shape in layer.items()}
    table = (PADDED_VOCAB // 2, 32)
    assert {name: tuple(tensor.shape) for name, tensor in last.items()} == {
        **{f"decoder.layers.0.{name}": shape for name, shape in layer.items()},
        "decoder.final_layernorm.weight": (32,),
        **{f"mtp.layers.0.{name}": shape for name, shape in depth.items()},
        "mtp.layers.0.final_layernorm.weight": (32,),
        "output_layer.weight": table,
        "embedding.word_embeddings.weight": table,  # for the tokens of each depth
    }


def test_the_arguments_are_megatron_lms(tmp_path: Path) -> None:
    written(LATENT, tmp_path)
    args = vars(trees(tmp_path / "made", "iter_0000050")["mp_rank_00"]["args"])
    wanted = {
        **{"multi_latent_attention": True, "q_lora_rank": 12, "kv_lora_rank": 8},
        **{"qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6, "rope_type": "yarn"},
        **{"rotary_scaling_factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7},
        **{"position_embedding_type": "rope", "qk_layernorm": True, "kv_channels": None},
        **{"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3},
    }
    assert {name: args[name] for name in wanted} == wanted
    plain = config_of(args | {"rope_type": "rope"}, "x")
    assert plain.attention_scale == pytest.approx(plain.head_dim**-0.5)


def test_the_name_of_the_main_branch_is_read(tmp_path: Path) -> None:
    state = written(LATENT, tmp_path)
    (path,) = (tmp_path / "made").rglob("model_optim_rng.pt")
    tree = torch.load(path, weights_only=False)
    tree["model"] = {
        name.replace("transformer_layer.", "mtp_model_layer."): tensor
        for name, tensor in tree["model"].items()
    }
    torch.save(tree, path)
    with open_megatron(str(tmp_path / "made")) as source:
        assert source.specs.keys() == {f"model.{key}" for key in state}


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({}, {"model_class": "legacy"}, "has no --multi-latent-attention, --mtp-num-layers"),
        ({"yarn_beta_fast": 16.0}, {}, "no flag for --yarn-beta-fast 16.0"),
    ],
)
def test_what_megatron_lm_does_not_have_is_refused(
    changes: dict[str, Any], options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        written(replace(LATENT, **changes), tmp_path, **options)
