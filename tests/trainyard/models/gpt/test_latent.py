"""Multi-latent attention in one process: its sizes, its cache, what it excludes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from trainyard.errors import ConfigError
from trainyard.inference.kv_cache import StaticKVCache
from trainyard.models.costs.flops import flops_per_iteration
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import init_parameters
from trainyard.models.latent_config import LatentConfig

VOCAB = 64
MLA = LatentConfig(
    multi_latent_attention=True,
    q_lora_rank=12,
    kv_lora_rank=8,
    qk_head_dim=8,
    qk_pos_emb_head_dim=4,
    v_head_dim=6,
)
OPTIONS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "qk_layernorm": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def model_of(mla: LatentConfig, **changes: Any) -> GPTModel:
    model = GPTModel(GPTConfig(**(OPTIONS | changes), mla=mla), VOCAB)
    init_parameters(model, 1)
    return model.eval()


@pytest.mark.parametrize(
    ("mla", "changes"),
    [
        (MLA, {}),
        (replace(MLA, q_lora_rank=None), {"qk_layernorm": False}),
        (replace(MLA, v_head_dim=20), {"disable_bias_linear": False, "normalization": "LayerNorm"}),
    ],
    ids=["queries of latents", "queries of tokens", "wide values"],
)
def test_every_parameter_is_counted(mla: LatentConfig, changes: dict[str, Any]) -> None:
    model = model_of(mla, **changes)
    assert sum(p.numel() for p in model.parameters()) == model.config.num_params(VOCAB)


def test_a_cache_of_latents_gives_the_same_logits_as_the_whole_text() -> None:
    model = model_of(MLA, yarn_rotary_scaling_factor=4.0, yarn_mscale_all_dim=1.0)
    tokens = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(3))
    cache = StaticKVCache(model.config, 2, 12)
    parts = []
    for piece in tokens.split([7, 1, 4], dim=1):
        cache.begin([piece.shape[1]] * 2)
        parts.append(model(piece, kv_cache=cache))
        cache.advance()
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=1e-5, atol=1e-6)
    of_token = MLA.kv_lora_rank + MLA.qk_pos_emb_head_dim
    assert cache.size_bytes == 2 * 2 * 12 * of_token * 4


def test_every_head_of_a_key_shares_its_rotating_channels() -> None:
    """Without still channels in the queries, all heads of a layer see the same scores."""
    model = model_of(replace(MLA, q_lora_rank=None), qk_layernorm=False)
    layer = model.decoder.layers["0"].self_attention
    seen = {}

    def keep(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen["k"] = k
        return v.new_zeros(*q.shape[:3], v.shape[3])

    layer.core_attention.attend = keep
    model(torch.arange(8).view(1, 8))
    shared = seen["k"][..., MLA.qk_head_dim :]
    assert torch.equal(shared, shared[:, :1].expand_as(shared))
    still = seen["k"][..., : MLA.qk_head_dim]
    assert not torch.equal(still[:, 0], still[:, 1])


def test_flops_count_the_narrow_and_the_wide_matrices() -> None:
    config = GPTConfig(**OPTIONS, mla=MLA, ffn_hidden_size=64)
    h, n, s = 32, 4, 16
    queries = h * 12 + 12 * n * 12
    keys_and_values = h * (8 + 4) + 8 * n * (8 + 6)
    weights = queries + keys_and_values + n * 6 * h + 3 * h * 64
    scores_and_values = s * n * (12 + 6) / 2
    assert flops_per_iteration(config, VOCAB, 1) == 6 * s * (
        2 * (weights + scores_and_values) + h * VOCAB
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"position_embedding_type": "learned_absolute"}, "rope or yarn, not learned_absolute"),
        ({"group_query_attention": True, "num_query_groups": 2}, "has no --group-query-attention"),
        (
            {"rotary_interleaved": True, "add_qkv_bias": True},
            "no --add-qkv-bias and no --rotary-interleaved",
        ),
    ],
)
def test_what_latents_do_not_go_with_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        GPTConfig(**(OPTIONS | changes), mla=MLA)


def test_rotating_channels_come_in_pairs() -> None:
    with pytest.raises(ConfigError, match=r"--qk-pos-emb-head-dim \(5\) must be even"):
        replace(MLA, qk_pos_emb_head_dim=5)
