"""Mixtures of experts in Megatron core's files: every matrix of an expert under its own number."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainyard.checkpoint.samples import PADDED_VOCAB, random_gpt, save_gpt
from tests.trainyard.conversion.megatron.converted_runs import convert
from tests.trainyard.conversion.megatron.megatron_files import Layout, arguments
from trainyard.checkpoint.load import open_checkpoint
from trainyard.conversion.megatron.read import open_megatron
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.moe_config import MoEConfig

E, FFN = 4, 24
MOE = MoEConfig(
    num_experts=E,
    moe_ffn_hidden_size=FFN,
    moe_layer_freq="[0,1]",
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_shared_expert_intermediate_size=16,
    moe_aux_loss_coeff=0.01,
)
CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=16,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    moe=MOE,
)

LLAMA4 = replace(
    CONFIG,
    qk_layernorm=True,
    qk_l2_norm=True,
    moe=MoEConfig(
        num_experts=E,
        moe_ffn_hidden_size=FFN,
        moe_router_topk=1,
        moe_router_score_function="sigmoid",
        moe_apply_probs_on_input=True,
        moe_shared_expert_intermediate_size=16,
    ),
)


def weights(config: GPTConfig = CONFIG) -> dict[str, Tensor]:
    found = random_gpt(config).state_dict()
    for name, tensor in found.items():
        if name.endswith("expert_bias"):
            tensor.copy_(torch.linspace(-1, 1, E))
    return found


def part(name: str, tensor: Tensor, tp: int, rank: int) -> Tensor:
    """What a tensor rank has, by the table of the format."""
    if "linear_fc1" in name:
        return torch.cat([half.chunk(tp)[rank] for half in tensor.chunk(2)])
    if name.endswith(("linear_fc2.weight", "linear_proj.weight")):
        return tensor.chunk(tp, 1)[rank].clone()
    rows = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight")
    return tensor.chunk(tp)[rank].clone() if name.endswith(rows) else tensor.clone()


def rank_model(
    whole: dict[str, Tensor], tp: int, rank: int, ep: int, of_experts: int, te: bool
) -> Any:
    """The model dict of one file, written from the description of the format alone."""
    model: dict[str, Tensor] = {}
    size = E // ep
    for name, tensor in whole.items():
        if ".experts.linear_fc" in name:
            before, _, matrix = name.partition(".experts.")
            for j in range(size):
                mine = part(matrix, tensor[of_experts * size + j], tp, rank)
                if te:
                    model[f"{before}.experts.{matrix}{j}"] = mine
                else:
                    model[f"{before}.experts.local_experts.{j}.{matrix}"] = mine
            continue
        theirs = name
        if te:
            theirs = theirs.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            if "layers.0." in name:  # the dense layer; the other keeps its norm apart
                theirs = theirs.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        model[theirs] = part(name, tensor, tp, rank)
    return model


def write_ranks(folder: Path, whole: dict[str, Tensor], tp: int, ep: int, te: bool) -> None:
    for rank in range(tp):
        for of_experts in range(ep):
            name = f"mp_rank_{rank:02d}" + (f"_{of_experts:03d}" if ep > 1 else "")
            args = vars(arguments(CONFIG, Layout(tp=tp), PADDED_VOCAB)) | {
                "num_experts": E,
                "moe_layer_freq": [0, 1],
                "moe_ffn_hidden_size": FFN,
                "moe_router_topk": 2,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_shared_expert_intermediate_size": 16,
                "moe_router_load_balancing_type": "aux_loss",
                "moe_aux_loss_coeff": 0.01,
                "expert_model_parallel_size": ep,
                "pipeline_model_parallel_size": 1,
                "tensor_model_parallel_size": tp,
            }
            args.pop("attention_backend", None)
            path = folder / "iter_0000100" / name
            path.mkdir(parents=True)
            tree = {
                "args": Namespace(**args),
                "checkpoint_version": 3.0,
                "iteration": 100,
                "model": rank_model(whole, tp, rank, ep, of_experts, te),
            }
            torch.save(tree, path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("100")


@pytest.mark.parametrize("te", [False, True], ids=["local", "grouped"])
@pytest.mark.parametrize(
    ("tp", "ep"), [(1, 2), *(pytest.param(*d, marks=pytest.mark.slow) for d in ((1, 1), (2, 4)))]
)
def test_experts_of_all_ranks_are_stacked(tp: int, ep: int, te: bool, tmp_path: Path) -> None:
    whole = weights()
    write_ranks(tmp_path, whole, tp, ep, te)
    with open_megatron(str(tmp_path)) as source:
        assert replace(source.config.experts, moe_token_dispatcher_type="allgather") == MOE
        assert source.specs.keys() == {f"model.{name}" for name in whole}
        for name, tensor in whole.items():
            assert torch.equal(source.read(f"model.{name}"), tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
@pytest.mark.parametrize("degrees", [{}, {"ep": 2}, {"tp": 2, "pp": 2, "ep": 4}], ids=str)
def test_what_is_written_reads_back(
    degrees: dict[str, int], impl: Any, grouped: bool, tmp_path: Path, caplog: Any
) -> None:
    config = replace(CONFIG, moe=replace(MOE, moe_grouped_gemm=grouped))
    model = random_gpt(config)
    save_gpt(str(tmp_path / "run"), model)
    with open_checkpoint(str(tmp_path / "run")) as checkpoint:
        convert(checkpoint, tmp_path / "made", transformer_impl=impl, **degrees)
    with open_megatron(str(tmp_path / "made")) as source:
        assert source.config.experts.num_experts == E
        for name, tensor in model.state_dict().items():
            assert torch.equal(source.read(f"model.{name}"), tensor), name


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_a_model_like_llama_4_reads_back(impl: Any, tmp_path: Path) -> None:
    model = random_gpt(LLAMA4)
    save_gpt(str(tmp_path / "run"), model)
    with open_checkpoint(str(tmp_path / "run")) as checkpoint:
        convert(checkpoint, tmp_path / "made", transformer_impl=impl, tp=2, ep=2)
    with open_megatron(str(tmp_path / "made")) as source:
        assert source.config.qk_l2_norm
        assert source.config.experts.moe_apply_probs_on_input
        assert source.specs.keys() == {f"model.{name}" for name in model.state_dict()}
        for name, tensor in model.state_dict().items():
            assert torch.equal(source.read(f"model.{name}"), tensor), name


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    write_ranks(tmp_path, weights(), 1, 4, False)
    (tmp_path / "iter_0000100/mp_rank_00_003/model_optim_rng.pt").unlink()
    with pytest.raises(ArtifactError, match="files are missing"):
        open_megatron(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ep": 3}, r"--target-expert-parallel-size \(3\) must divide the 4 experts"),
        ({"model_class": "legacy"}, "has no --num-experts"),
    ],
)
def test_what_cannot_be_written_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(CONFIG))
    with (
        open_checkpoint(str(tmp_path / "run")) as checkpoint,
        pytest.raises(ConfigError, match=message),
    ):
        convert(checkpoint, tmp_path / "made", **options)
