"""The small models that are cut over ranks, by the names of their kinds."""

from __future__ import annotations

from typing import Any

from trainyard.models.bert.config import BertConfig
from trainyard.models.config import TransformerConfig
from trainyard.models.latent_config import LatentConfig
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.moe_config import MoEConfig
from trainyard.models.mtp_config import MTPConfig
from trainyard.models.retro.config import RetroConfig
from trainyard.models.t5.config import T5Config

SEQ_LENGTH = 16

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 8,
    "ffn_hidden_size": 48,
    "seq_length": SEQ_LENGTH,
    "make_vocab_size_divisible_by": 4,
    "attention_dropout": 0.0,
    "init_method_std": 0.1,
}
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "bert": {},
    "t5": {"decoder_num_layers": 2, "decoder_seq_length": 8},
    "google t5": {
        "decoder_num_layers": 2,
        "decoder_seq_length": 8,
        "position_embedding_type": "relative",
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
        "normalization": "RMSNorm",
        "disable_bias_linear": True,
        "geglu": True,
    },
    "retro": {"retro_chunk_length": 4, "retro_encoder_attention_dropout": 0.0},
    "mamba": {
        **{"mamba_state_dim": 4, "mamba_head_dim": 8, "mamba_num_groups": 4},
        **{"mamba_chunk_size": 4, "position_embedding_type": "none", "normalization": "RMSNorm"},
    },
    "llama": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
        "group_query_attention": True,
        "num_query_groups": 4,
    },
}
KINDS |= {
    "hybrid": KINDS["mamba"]
    | {"hybrid_attention_ratio": 0.25, "hybrid_mlp_ratio": 0.25, "position_embedding_type": "rope"},
    "hybrid moe": KINDS["mamba"]
    | {"hybrid_layer_pattern": "ME*E", "moe": MoEConfig(num_experts=4, moe_aux_loss_coeff=0.02)},
    "mixtral": KINDS["llama"]
    | {
        "moe": MoEConfig(
            num_experts=4,
            moe_ffn_hidden_size=24,
            moe_aux_loss_coeff=0.02,
            moe_z_loss_coeff=1e-3,
            moe_token_dispatcher_type="alltoall",
        )
    },
    "deepseek moe": KINDS["llama"]
    | {
        "moe": MoEConfig(
            num_experts=8,
            moe_router_topk=4,
            moe_layer_freq="2",
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_router_bias_update_rate=0.01,
            moe_router_num_groups=4,
            moe_router_group_topk=2,
            moe_router_topk_scaling_factor=1.5,
            moe_router_load_balancing_type="seq_aux_loss",
            moe_aux_loss_coeff=0.02,
            moe_shared_expert_intermediate_size=16,
            moe_ffn_hidden_size=16,
            moe_router_dtype="fp32",
        )
    },
    "gpt moe": {
        "moe": MoEConfig(
            num_experts=4,
            moe_router_pre_softmax=True,
            moe_aux_loss_coeff=0.02,
            moe_shared_expert_intermediate_size=16,
            moe_shared_expert_gate=True,
        )
    },
}
KINDS["llama 4"] = KINDS["llama"] | {
    "qk_l2_norm": True,
    "rotary_interleaved": True,
    "moe": MoEConfig(
        num_experts=4,
        moe_ffn_hidden_size=24,
        moe_router_topk=1,
        moe_router_score_function="sigmoid",
        moe_apply_probs_on_input=True,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=0.02,
        moe_shared_expert_intermediate_size=16,
        moe_token_dispatcher_type="alltoall",
    ),
}
LATENTS: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "qk_layernorm": True,
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 8,
    "yarn_mscale_all_dim": 1.0,
    "mla": LatentConfig(
        multi_latent_attention=True,
        q_lora_rank=12,
        kv_lora_rank=10,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=6,
    ),
}
KINDS |= {
    "latent": LATENTS,
    "latent queries of tokens": LATENTS
    | {
        "qk_layernorm": False,
        "mla": LatentConfig(
            multi_latent_attention=True,
            kv_lora_rank=10,
            qk_head_dim=4,
            qk_pos_emb_head_dim=2,
            v_head_dim=8,
        ),
    },
    "deepseek v3": LATENTS | {"moe": KINDS["deepseek moe"]["moe"]},
    "predicting": KINDS["llama"] | {"prediction": MTPConfig(mtp_num_layers=2)},
    "predicting deepseek": LATENTS
    | {
        "moe": KINDS["deepseek moe"]["moe"],
        "prediction": MTPConfig(mtp_num_layers=1, mtp_loss_scaling_factor=0.3),
    },
}
KINDS["gpt-oss"] = {
    "position_embedding_type": "yarn",
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 8,
    "yarn_correction_range_round_to_int": False,
    "normalization": "RMSNorm",
    "group_query_attention": True,
    "num_query_groups": 4,
    "kv_channels": 8,
    "quick_geglu": True,
    "activation_func_clamp_value": 0.5,
    "glu_linear_offset": 1.0,
    "softmax_type": "learnable",
    "window_size": "5,0",
    "window_attn_skip_freq": "2",
    "moe": MoEConfig(num_experts=4, moe_ffn_hidden_size=24, moe_aux_loss_coeff=0.02),
}
MODELS: dict[str, type[TransformerConfig]] = {
    "bert": BertConfig,
    **dict.fromkeys(("t5", "google t5"), T5Config),
    "retro": RetroConfig,
    **dict.fromkeys(("mamba", "hybrid", "hybrid moe"), MambaConfig),
}
"""Of the kinds that are not a GPT."""
