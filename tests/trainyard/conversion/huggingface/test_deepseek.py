"""DeepSeek's folders: multi-token prediction in them, and models that come back as they went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from tests.trainyard.conversion.huggingface.test_read import (
    ROTARY,
    assert_out_and_in_is_the_identity,
    export,
)
from trainyard.checkpoint.load import open_checkpoint
from trainyard.conversion.huggingface.read import open_huggingface
from trainyard.conversion.native import CheckpointSource
from trainyard.errors import ArtifactError
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.latent_config import LatentConfig
from trainyard.models.moe_config import MoEConfig
from trainyard.models.mtp_config import MTPConfig

LATENTS: dict[str, Any] = {
    "norm_epsilon": 1e-6,
    "qk_layernorm": True,
    "mla": LatentConfig(multi_latent_attention=True, q_lora_rank=12, qk_head_dim=8, v_head_dim=6),
}


@pytest.mark.parametrize(
    "config",
    [
        GPTConfig(**ROTARY, **LATENTS, prediction=MTPConfig(mtp_num_layers=2)),
        GPTConfig(
            **ROTARY,
            **LATENTS,
            moe=MoEConfig(
                num_experts=4,
                moe_layer_freq="[0,1]",
                moe_ffn_hidden_size=16,
                moe_shared_expert_intermediate_size=16,
                moe_router_score_function="sigmoid",
                moe_router_enable_expert_bias=True,
                moe_router_dtype="fp32",
                moe_router_load_balancing_type="seq_aux_loss",
            ),
            prediction=MTPConfig(mtp_num_layers=1),
            untie_embeddings_and_output_weights=True,
        ),
    ],
    ids=["dense", "v3"],
)
def test_out_and_in_is_the_identity(config: GPTConfig, tmp_path: Path) -> None:
    assert_out_and_in_is_the_identity(config, tmp_path)


def test_files_of_deepseek_repeat_the_tables_in_every_layer_of_prediction(tmp_path: Path) -> None:
    untied = {"untie_embeddings_and_output_weights": True}
    config = GPTConfig(**ROTARY, **LATENTS, **untied, prediction=MTPConfig(mtp_num_layers=1))
    save_gpt(str(tmp_path / "run"), random_gpt(config))
    with CheckpointSource(open_checkpoint(str(tmp_path / "run"))) as source:
        export(source, tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["model.layers.2.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.2.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    safetensors.torch.save_file(tensors, file)
    with open_huggingface(str(tmp_path / "hf")) as source:
        assert source.config.mtp.mtp_num_layers == 1
    tensors["model.layers.2.shared_head.head.weight"][0, 0] += 1
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(ArtifactError, match=r"shared_head.head.weight differs from lm_head.weight"):
        open_huggingface(str(tmp_path / "hf"))
    without = {name: t for name, t in tensors.items() if not name.startswith("model.layers.2.")}
    safetensors.torch.save_file(without, file)
    with open_huggingface(str(tmp_path / "hf")) as source:
        assert source.config.mtp.mtp_num_layers is None
