"""T5 in Megatron-LM's checkpoints: names of both classes, every split over tensor ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainyard.conversion.megatron.converted_runs import ROWS, convert_weights, model_in
from tests.trainyard.models.perturbed import perturb
from trainyard.conversion.megatron.names import flatten
from trainyard.conversion.megatron.read import open_megatron
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.init import init_parameters
from trainyard.models.t5.config import T5Config
from trainyard.models.t5.model import T5Model

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "kv_channels": 6,
    "seq_length": 16,
    "decoder_seq_length": 8,
}
RELATIVE = {
    "position_embedding_type": "relative",
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "untie_embeddings_and_output_weights": True,
    "normalization": "RMSNorm",
    "softmax_scale": 1.0,
}


def weights(**options: Any) -> tuple[T5Config, dict[str, Tensor]]:
    config = T5Config(**(SIZES | options))
    model = T5Model(config, ROWS)
    init_parameters(model, 3)
    perturb(model, seed=4, scale=1.0)
    return config, {name: tensor.detach() for name, tensor in model.named_parameters()}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ["legacy", "transformer_engine", "local"])
@pytest.mark.parametrize("options", [{}, RELATIVE], ids=["learned", "relative"])
def test_every_split_is_written_and_read(
    tmp_path: Path, kind: str, tp: int, options: dict[str, Any]
) -> None:
    config, ours = weights(**options)
    is_legacy = kind == "legacy"
    target = {"model_class": "legacy"} if is_legacy else {"transformer_impl": kind}
    if is_legacy and options:
        with pytest.raises(ConfigError, match="the legacy model class of Megatron-LM has no"):
            convert_weights(tmp_path, config, ours, **target)
        return
    with open_megatron(str(convert_weights(tmp_path, config, ours, tp=tp, **target))) as source:
        assert isinstance(source.config, T5Config)
        for name in (*SIZES, *options):
            assert getattr(source.config, name) == getattr(config, name), name
        assert source.config.decoder_layers == 2
        assert {name.removeprefix("model.") for name in source.specs} == set(ours)
        for name, tensor in ours.items():
            assert torch.equal(source.read(f"model.{name}"), tensor), name


def test_core_files_have_the_names_of_megatron(tmp_path: Path) -> None:
    made = convert_weights(tmp_path, *weights(), tp=2, transformer_impl="transformer_engine")
    model, args = model_in(made, rank="01")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.items()}
    layer = "decoder.layers.1."
    assert shapes[f"{layer}cross_attention.linear_q.weight"] == (12, 32)
    assert shapes[f"{layer}cross_attention.linear_kv.bias"] == (24,)
    assert shapes[f"{layer}cross_attention.linear_proj.weight"] == (32, 12)
    assert shapes[f"{layer}pre_cross_attn_layernorm.weight"] == (32,)
    assert shapes["encoder.layers.1.self_attention.linear_qkv.layer_norm_weight"] == (32,)
    assert {"encoder.final_layernorm.weight", "decoder.final_layernorm.weight"} < shapes.keys()
    for copy, original in (
        ("position_embeddings.weight", "embedding.position_embeddings.weight"),
        ("output_layer.bias", "lm_head.output_layer.bias"),
    ):
        assert torch.equal(model[copy], model[original])
    assert "lm_head.output_layer.weight" not in shapes
    assert (args.encoder_num_layers, args.decoder_num_layers) == (2, 2)
    assert (args.encoder_seq_length, args.decoder_seq_length, args.kv_channels) == (16, 8, 6)


def test_legacy_files_have_the_names_of_megatron(tmp_path: Path) -> None:
    made = convert_weights(tmp_path, *weights(), model_class="legacy")
    model, _ = model_in(made)
    assert set(model) == {"language_model", "lm_head"}
    assert set(model["lm_head"]) == {"bias"}
    assert set(model["language_model"]) == {"embedding", "encoder", "decoder"}
    names = {
        name.removeprefix("layers.0.").rpartition(".")[0]
        for name in model["language_model"]["decoder"]
        if name.startswith("layers.0.")
    }
    assert names == {
        *("input_norm", "self_attention.query_key_value", "self_attention.dense"),
        *("post_attention_norm", "inter_attention.query", "inter_attention.key_value"),
        *("inter_attention.dense", "post_inter_attention_norm"),
        *("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    }
    assert "post_inter_attention_norm" not in str(model["language_model"]["encoder"].keys())
    assert sum(1 for _ in flatten(model)) == 2 + 1 + 2 * 2 + 2 * 12 + 2 * 20


def test_rows_of_version_0_are_reordered(tmp_path: Path) -> None:
    """All queries, all keys, all values, in the file of each rank."""
    config, ours = weights()
    made = convert_weights(tmp_path, config, ours, model_class="legacy")
    file = made / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt"
    tree = torch.load(file, weights_only=False)
    tree["checkpoint_version"] = 0
    for stack in ("encoder", "decoder"):
        module = tree["model"]["language_model"][stack]
        for name, tensor in module.items():
            kinds = {"query_key_value": 3, "key_value": 2}.get(name.split(".")[-2], 0)
            if kinds:
                rest = tensor.shape[1:]
                by_head = tensor.view(4, kinds, 6, *rest)
                module[name] = by_head.transpose(0, 1).reshape(tensor.shape)
    torch.save(tree, file)
    with open_megatron(str(made)) as source:
        for name, tensor in ours.items():
            assert torch.equal(source.read(f"model.{name}"), tensor), name


@pytest.mark.parametrize(
    ("options", "target", "message"),
    [
        ({"relu": True}, {}, "Megatron-LM's T5 has no --relu"),
        ({"lm_head_bias": False}, {}, "Megatron-LM's T5 has no --no-lm-head-bias"),
        ({"decoder_num_layers": 3}, {}, r"as many layers in the decoder \(3\) as in the encoder"),
        ({}, {"pp": 2}, "--target-pipeline-parallel-size 2: Megatron-LM's T5 has one pipeline"),
    ],
)
def test_a_t5_that_megatron_does_not_have_is_refused(
    tmp_path: Path, options: dict[str, Any], target: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        convert_weights(tmp_path, *weights(**options), **target)


def test_a_t5_over_pipeline_ranks_is_refused(tmp_path: Path) -> None:
    made = convert_weights(tmp_path, *weights())
    folder = made / "iter_0000100"
    one = folder / "mp_rank_00"
    for rank in range(2):
        other = folder / f"mp_rank_00_{rank:03d}"
        other.mkdir()
        (other / "model_optim_rng.pt").write_bytes((one / "model_optim_rng.pt").read_bytes())
    (one / "model_optim_rng.pt").unlink()
    with pytest.raises(ConfigError, match="is a T5 over 2 pipeline ranks"):
        open_megatron(str(made))


def test_a_t5_whose_decoder_lacks_a_layer_is_refused(tmp_path: Path) -> None:
    made = convert_weights(tmp_path, *weights())
    file = made / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt"
    tree = torch.load(file, weights_only=False)
    del tree["model"]["decoder.layers.1.cross_attention.linear_q.weight"]
    torch.save(tree, file)
    with pytest.raises(ArtifactError, match=r"decoder\.layers\.1\.cross_attention\.linear_q"):
        open_megatron(str(made))
