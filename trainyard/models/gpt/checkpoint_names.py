"""Names of a GPT's parameters in the checkpoints of others. Data only: `conversion` applies it.

Ours are those of Megatron core's GPTModel with its local layer. Tables of Hugging Face and Meta
have rows (their name, our name, part): the part of our tensor that theirs is, see `Part`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Part = Literal[
    "whole",
    "transposed",
    "q",
    "k",
    "v",
    "qkv",
    "qkv transposed",
    "gate",
    "up",
    "cross k",
    "cross v",
    "pairs",
    "pairs transposed",
    "experts transposed",
]
"""q, k, v: queries, keys or values of our QKV tensor, which is grouped by query group. cross k,
cross v: keys or values of linear_kv, which has them head by head.
qkv: all three, ungrouped. gate, up: halves of linear_fc1. transposed: (in, out), as in GPT-2's
Conv1D. pairs: of all experts, each row of the gate before that of the up; experts transposed:
(experts, in, out)."""

Names = tuple[tuple[str, str, Part], ...]


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """A part of the matrix of one expert, of our stacked tensor of all."""

    expert: int
    part: Part


LAYER = "decoder.layers."
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm."

# --- Megatron-LM ------------------------------------------------------------------------------

ENGINE = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Core with Transformer Engine's layer, which keeps a norm inside the matrix that follows it:
prefixes of names, and ours."""

ENGINE_LATENTS = {
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""The same with multi-latent attention, whose input norm is a module of its own there as well."""

PREDICTION = "mtp.layers."
"""Layers of multi-token prediction, on the last stage."""

LEGACY = {
    "input_norm.": "input_layernorm.",
    "self_attention.query_key_value.": "self_attention.linear_qkv.",
    "self_attention.dense.": "self_attention.linear_proj.",
    "post_attention_norm.": "pre_mlp_layernorm.",
    "mlp.dense_h_to_4h.": "mlp.linear_fc1.",
    "mlp.dense_4h_to_h.": "mlp.linear_fc2.",
}
"""The legacy model class, as written since 2023-09."""

LEGACY_READ = LEGACY | {
    "input_layernorm.": "input_layernorm.",
    "post_attention_layernorm.": "pre_mlp_layernorm.",
    # --transformer-impl transformer_engine
    "self_attention.layernorm_qkv.layer_norm_": "input_layernorm.",
    "self_attention.layernorm_qkv.": "self_attention.linear_qkv.",
    "self_attention.proj.": "self_attention.linear_proj.",
    "layernorm_mlp.layer_norm_": "pre_mlp_layernorm.",
    "layernorm_mlp.fc1_": "mlp.linear_fc1.",
    "layernorm_mlp.fc2_": "mlp.linear_fc2.",
}
"""All spellings of the legacy class."""

_FROM_QKV = (
    "self_attention.linear_qkv.",
    "self_attention.linear_q_proj.",
    "self_attention.linear_q_down_proj.",
    "self_attention.q_layernorm.",  # of latents in the matrix behind it
    "self_attention.linear_q_up_proj.",
    "self_attention.linear_kv_down_proj.",
    "self_attention.kv_layernorm.",
    "self_attention.linear_kv_up_proj.",
    "self_attention.k_layernorm.",
    "pre_cross_attn_layernorm.",
    "cross_attention.",
    "pre_mlp_layernorm.",
    "mlp.linear_fc1.",
    "mlp.linear_fc2.",
    "mlp.router.",
    "mlp.experts.",
    "mlp.shared_experts.gate_weight",
    "mlp.shared_experts.linear_fc1.",
    "mlp.shared_experts.linear_fc2.",
)

_MIXER = (
    *("mixer.dt_bias", "mixer.A_log", "mixer.D", "pre_mixer_layernorm.", "mixer.in_proj."),
    *("mixer.conv1d.weight", "mixer.conv1d.bias", "mixer.norm.", "mixer.out_proj."),
)
"""Of a Mamba layer."""

EXPERT_BIAS = "mlp.router.expert_bias"
"""End of the name of a bias that no optimizer moves."""

REGISTRATION_ORDER: dict[str, tuple[str, ...]] = {
    "legacy": (
        "input_layernorm.",
        "self_attention.linear_qkv.",
        "self_attention.linear_proj.",
        "pre_cross_attn_layernorm.",
        "cross_attention.",
        "pre_mlp_layernorm.",
        "mlp.linear_fc1.",
        "mlp.linear_fc2.",
    ),
    "local": (
        "input_layernorm.",
        "self_attention.core_attention.",
        "self_attention.linear_proj.",
        *_FROM_QKV,
    ),
    "transformer_engine": (
        *_MIXER,
        "self_attention.core_attention.",
        "self_attention.linear_proj.",
        "input_layernorm.",
        *_FROM_QKV,
    ),
}
"""Parameters of a layer in the order in which Megatron's modules register them: the order of the
file, by which an optimizer numbers its states."""

WITH_EXTRA_STATE = tuple(
    f".{module}"
    for module in (
        *("input_layernorm", "pre_mlp_layernorm", "pre_cross_attn_layernorm", "final_layernorm"),
        *("self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.q_layernorm"),
        *("self_attention.k_layernorm", "self_attention.core_attention"),
        *("self_attention.linear_q_proj",),
        *("self_attention.linear_q_down_proj", "self_attention.linear_q_up_proj"),
        *("self_attention.linear_kv_down_proj", "self_attention.linear_kv_up_proj"),
        *("cross_attention.linear_q", "cross_attention.linear_kv", "cross_attention.linear_proj"),
        *("mlp.linear_fc1", "mlp.linear_fc2", "mlp.experts.experts.linear_fc1"),
        *("mlp.experts.experts.linear_fc2", "mlp.shared_experts.linear_fc1"),
        *("mlp.shared_experts.linear_fc2", "mixer.in_proj", "mixer.out_proj", "final_norm"),
        *("enorm", "hnorm", "eh_proj"),
    )
)
"""Ends of names of modules with weights that keep an `_extra_state` in Megatron core's sharded
checkpoints."""

PREDICTION_ATTENTION = "transformer_layer.self_attention.core_attention"
"""Module of a depth of multi-token prediction that keeps one up to core 0.15, without weights."""

# --- Hugging Face, in the order of its files --------------------------------------------------

LLAMA: Names = (
    ("model.embed_tokens.weight", EMBEDDING, "whole"),
    ("model.norm.weight", "decoder.final_layernorm.weight", "whole"),
    ("lm_head.weight", OUTPUT, "whole"),
)
LLAMA_LAYER: Names = (
    ("self_attn.q_proj.bias", "self_attention.linear_qkv.bias", "q"),  # Qwen2
    ("self_attn.k_proj.bias", "self_attention.linear_qkv.bias", "k"),
    ("self_attn.v_proj.bias", "self_attention.linear_qkv.bias", "v"),
    ("self_attn.q_norm.weight", "self_attention.q_layernorm.weight", "whole"),  # Qwen3
    ("self_attn.k_norm.weight", "self_attention.k_layernorm.weight", "whole"),
    ("input_layernorm.weight", "input_layernorm.weight", "whole"),
    ("self_attn.q_proj.weight", "self_attention.linear_qkv.weight", "q"),
    ("self_attn.k_proj.weight", "self_attention.linear_qkv.weight", "k"),
    ("self_attn.v_proj.weight", "self_attention.linear_qkv.weight", "v"),
    ("self_attn.o_proj.weight", "self_attention.linear_proj.weight", "whole"),
    ("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", "whole"),
    ("mlp.gate_proj.weight", "mlp.linear_fc1.weight", "gate"),
    ("mlp.up_proj.weight", "mlp.linear_fc1.weight", "up"),
    ("mlp.down_proj.weight", "mlp.linear_fc2.weight", "whole"),
)
"""Below `model.layers.N.`; of Mistral and Qwen too."""

MIXTRAL_ROUTER: Names = (("block_sparse_moe.gate.weight", "mlp.router.weight", "whole"),)
MIXTRAL_EXPERT: Names = (
    ("block_sparse_moe.experts.{}.w1.weight", "mlp.experts.linear_fc1.weight", "gate"),
    ("block_sparse_moe.experts.{}.w3.weight", "mlp.experts.linear_fc1.weight", "up"),
    ("block_sparse_moe.experts.{}.w2.weight", "mlp.experts.linear_fc2.weight", "whole"),
)
QWEN3_ROUTER: Names = (("mlp.gate.weight", "mlp.router.weight", "whole"),)
QWEN3_EXPERT: Names = (
    ("mlp.experts.{}.gate_proj.weight", "mlp.experts.linear_fc1.weight", "gate"),
    ("mlp.experts.{}.up_proj.weight", "mlp.experts.linear_fc1.weight", "up"),
    ("mlp.experts.{}.down_proj.weight", "mlp.experts.linear_fc2.weight", "whole"),
)
"""Below `model.layers.N.` in place of the MLP; {} is the number of the expert."""

DEEPSEEK_V3_ROUTER: Names = (
    *QWEN3_ROUTER,
    ("mlp.gate.e_score_correction_bias", "mlp.router.expert_bias", "whole"),
)
DEEPSEEK_SHARED: Names = (
    ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.linear_fc1.weight", "gate"),
    ("mlp.shared_experts.up_proj.weight", "mlp.shared_experts.linear_fc1.weight", "up"),
    ("mlp.shared_experts.down_proj.weight", "mlp.shared_experts.linear_fc2.weight", "whole"),
)
DEEPSEEK_PREDICTION: Names = (
    ("enorm.weight", "enorm.weight", "whole"),
    ("hnorm.weight", "hnorm.weight", "whole"),
    ("eh_proj.weight", "eh_proj.weight", "whole"),
    ("shared_head.norm.weight", "final_layernorm.weight", "whole"),
)
"""Of a layer of multi-token prediction, beside its transformer layer."""
DEEPSEEK_QUERIES: tuple[Names, Names] = (
    (("self_attn.q_proj.weight", "self_attention.linear_q_proj.weight", "whole"),),
    (
        ("self_attn.q_a_proj.weight", "self_attention.linear_q_down_proj.weight", "whole"),
        ("self_attn.q_a_layernorm.weight", "self_attention.q_layernorm.weight", "whole"),
        ("self_attn.q_b_proj.weight", "self_attention.linear_q_up_proj.weight", "whole"),
    ),
)
"""Without and with a latent of the queries."""
DEEPSEEK_KEYS: Names = (
    ("self_attn.kv_a_proj_with_mqa.weight", "self_attention.linear_kv_down_proj.weight", "whole"),
    ("self_attn.kv_a_layernorm.weight", "self_attention.kv_layernorm.weight", "whole"),
    ("self_attn.kv_b_proj.weight", "self_attention.linear_kv_up_proj.weight", "whole"),
)
"""In place of queries, keys and values; rows of heads are in the same order as ours."""

GPT_OSS_LAYER: Names = (
    ("self_attn.sinks", "self_attention.core_attention.softmax_offset", "whole"),
    ("self_attn.o_proj.bias", "self_attention.linear_proj.bias", "whole"),
)
"""Beside LLAMA_LAYER's, below `model.layers.N.`."""
GPT_OSS_MLP: Names = (
    ("mlp.router.weight", "mlp.router.weight", "whole"),
    ("mlp.router.bias", "mlp.router.bias", "whole"),
    ("mlp.experts.gate_up_proj", "mlp.experts.linear_fc1.weight", "pairs transposed"),
    ("mlp.experts.gate_up_proj_bias", "mlp.experts.linear_fc1.bias", "pairs"),
    ("mlp.experts.down_proj", "mlp.experts.linear_fc2.weight", "experts transposed"),
    ("mlp.experts.down_proj_bias", "mlp.experts.linear_fc2.bias", "whole"),
)

GPT2: Names = (
    ("transformer.wte.weight", EMBEDDING, "whole"),
    ("transformer.wpe.weight", "embedding.position_embeddings.weight", "whole"),
    ("transformer.ln_f.weight", "decoder.final_layernorm.weight", "whole"),
    ("transformer.ln_f.bias", "decoder.final_layernorm.bias", "whole"),
)
GPT2_LAYER: Names = (
    ("ln_1.weight", "input_layernorm.weight", "whole"),
    ("ln_1.bias", "input_layernorm.bias", "whole"),
    ("attn.c_attn.weight", "self_attention.linear_qkv.weight", "qkv transposed"),
    ("attn.c_attn.bias", "self_attention.linear_qkv.bias", "qkv"),
    ("attn.c_proj.weight", "self_attention.linear_proj.weight", "transposed"),
    ("attn.c_proj.bias", "self_attention.linear_proj.bias", "whole"),
    ("ln_2.weight", "pre_mlp_layernorm.weight", "whole"),
    ("ln_2.bias", "pre_mlp_layernorm.bias", "whole"),
    ("mlp.c_fc.weight", "mlp.linear_fc1.weight", "transposed"),
    ("mlp.c_fc.bias", "mlp.linear_fc1.bias", "whole"),
    ("mlp.c_proj.weight", "mlp.linear_fc2.weight", "transposed"),
    ("mlp.c_proj.bias", "mlp.linear_fc2.bias", "whole"),
)
"""Below `transformer.h.N.`."""

# --- Meta -------------------------------------------------------------------------------------

META_LAYER: Names = (
    ("attention_norm.weight", "input_layernorm.weight", "whole"),
    ("attention.wq.weight", "self_attention.linear_qkv.weight", "q"),
    ("attention.wk.weight", "self_attention.linear_qkv.weight", "k"),
    ("attention.wv.weight", "self_attention.linear_qkv.weight", "v"),
    ("attention.wo.weight", "self_attention.linear_proj.weight", "whole"),
    ("ffn_norm.weight", "pre_mlp_layernorm.weight", "whole"),
    ("feed_forward.w1.weight", "mlp.linear_fc1.weight", "gate"),
    ("feed_forward.w3.weight", "mlp.linear_fc1.weight", "up"),
    ("feed_forward.w2.weight", "mlp.linear_fc2.weight", "whole"),
)
"""Below `layers.N.`; rows of queries and keys are ordered for interleaved rotation."""
