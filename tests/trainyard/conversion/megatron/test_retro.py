"""A Retro in Megatron-LM's checkpoints: names, every split over tensor ranks, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainyard.conversion.megatron.converted_runs import ROWS, convert_weights, model_in
from tests.trainyard.models.perturbed import perturb
from trainyard.conversion.megatron.args import config_of
from trainyard.conversion.megatron.names import registration_order
from trainyard.conversion.megatron.read import open_megatron
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.init import init_parameters
from trainyard.models.retro.config import RetroConfig
from trainyard.models.retro.model import RetroModel

SIZES: dict[str, Any] = {
    "num_layers": 9,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "retro_chunk_length": 4,
    "retro_num_neighbors": 2,
    "retro_num_retrieved_chunks": 2,
    "retro_encoder_hidden_dropout": 0.0,
    "retro_encoder_attention_dropout": 0.0,
}
LLAMA: dict[str, Any] = {
    "retro_encoder_layers": 3,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}

WITHOUT_NORM = {"retro_no_final_layernorm": True}
"""As Megatron core 0.8 and later build it."""


def weights(**options: Any) -> tuple[RetroConfig, dict[str, Tensor]]:
    config = RetroConfig(**(SIZES | options))
    model = RetroModel(config, ROWS)
    init_parameters(model, 3)
    perturb(model, seed=4, scale=0.2)
    return config, {name: tensor.detach() for name, tensor in model.named_parameters()}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", ["transformer_engine", "local"])
@pytest.mark.parametrize(
    "options", [{}, LLAMA, WITHOUT_NORM], ids=["gpt", "llama", "without a final norm"]
)
def test_every_split_is_written_and_read(
    tmp_path: Path, kind: str, tp: int, options: dict[str, Any]
) -> None:
    config, ours = weights(**options)
    made = convert_weights(tmp_path, config, ours, tp=tp, transformer_impl=kind)
    with open_megatron(str(made)) as source:
        assert isinstance(source.config, RetroConfig)
        for name in (*SIZES, *options):
            assert getattr(source.config, name) == getattr(config, name), name
        assert source.config.cross_layers == (5, 8)
        assert source.config.retro_no_final_layernorm == config.retro_no_final_layernorm
        assert {name.removeprefix("model.") for name in source.specs} == set(ours)
        for name, tensor in ours.items():
            assert torch.equal(source.read(f"model.{name}"), tensor), name


def test_files_have_the_names_of_megatron(tmp_path: Path) -> None:
    model, args = model_in(convert_weights(tmp_path, *weights(), tp=2), rank="01")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.items()}
    layer, encoder = "decoder.layers.5.", "decoder.layers.5.cross_attention.encoder.layers."
    assert shapes[f"{layer}cross_attention.attn.linear_q.weight"] == (16, 32)
    assert shapes[f"{layer}cross_attention.attn.linear_kv.bias"] == (32,)
    assert shapes[f"{layer}cross_attention.attn.linear_proj.weight"] == (32, 16)
    assert shapes[f"{layer}mlp.linear_fc1.layer_norm_weight"] == (32,)
    assert shapes[f"{encoder}0.pre_mlp_layernorm.norm.weight"] == (32,)
    assert shapes[f"{encoder}0.cross_attention.attn.linear_kv.weight"] == (32, 32)
    assert shapes[f"{encoder}0.self_attention.linear_qkv.layer_norm_bias"] == (32,)
    assert shapes[f"{encoder}1.mlp.linear_fc1.layer_norm_weight"] == (32,)
    assert f"{encoder}1.cross_attention.attn.linear_q.weight" not in shapes
    assert not any("final_layernorm" in name for name in shapes if "encoder" in name)
    assert args.retro_add_retriever is True
    assert (args.retro_chunk_length, args.retro_retrieved_length) == (4, 8)
    assert (args.retro_encoder_layers, args.retro_encoder_num_layers) == (2, 2)


@pytest.mark.parametrize(
    ("options", "target", "said"),
    [
        ({"retro_cross_attention_layers": (2, 4)}, {}, "but every third from 6"),
        ({"retro_attention_gate": 0.5}, {}, "has no --retro-attention-gate"),
        ({"num_query_groups": 2, "group_query_attention": True}, {}, "--group-query-attention"),
        ({"qk_layernorm": True}, {}, "has no --qk-layernorm"),
        ({"window_size": "4,0"}, {}, "has no --window-size"),
        ({}, {"pp": 3}, "Megatron-LM's Retro has one pipeline stage"),
        ({}, {"model_class": "legacy"}, "legacy model class of Megatron-LM has no Retro"),
    ],
)
def test_what_megatron_does_not_compute_is_refused(
    tmp_path: Path, options: dict[str, Any], target: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        convert_weights(tmp_path, *weights(**options), **target)
    assert not (tmp_path / "made").exists()


def test_a_gpt_whose_args_ask_for_a_retriever_is_refused() -> None:
    with pytest.raises(ConfigError, match="retro_add_retriever"):
        config_of({"num_layers": 2, "retro_add_retriever": True}, "args")


def test_whole_numbers_may_be_dropout_and_missing_arguments_are_megatrons_defaults() -> None:
    args = {
        **{"model_type": "retro", "retro_add_retriever": True, "retro_encoder_hidden_dropout": 0},
        **{"num_layers": 12, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 128},
    }
    config = config_of(args, "args")
    assert isinstance(config, RetroConfig)
    assert config.retro_encoder_hidden_dropout == 0.0
    assert (config.retro_chunk_length, config.retro_encoder_layers) == (64, 2)
    assert config.cross_layers == (5, 8, 11)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (3, r"cross_attention\.encoder\.layers\.2"),
        (4000, r"says 4009 layers, and there are \d+ tensors"),
        (5000, "describes no model: .*--retro-encoder-layers must be at most 4096"),
        ("x", "describes no model: .*retro_encoder_layers"),
    ],
)
def test_files_whose_tensors_are_not_of_their_args_are_refused(
    tmp_path: Path, layers: Any, said: str
) -> None:
    made = convert_weights(tmp_path, *weights())
    file = made / "iter_0000100/mp_rank_00/model_optim_rng.pt"
    tree = torch.load(file, weights_only=False)
    tree["args"].retro_encoder_layers = layers
    torch.save(tree, file)
    with pytest.raises(ArtifactError, match=said):
        open_megatron(str(made))


def test_layers_are_in_the_order_of_megatrons_modules() -> None:
    names = [
        f"decoder.layers.5.{rest}.weight"
        for rest in ("mlp.linear_fc1", "cross_attention.attn.linear_q", "input_layernorm")
    ]
    assert registration_order(names, "local") == [names[2], names[1], names[0]]
