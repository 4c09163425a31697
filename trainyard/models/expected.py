"""Options that a command expects of the model in a checkpoint: NAME=VALUE, as its command line says
them. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainyard.config import flag, to_dict
from trainyard.errors import ConfigError
from trainyard.models.config import TransformerConfig
from trainyard.models.layer_pattern import every_nth

OF_ALL = """
num_layers hidden_size num_attention_heads ffn_hidden_size kv_channels group_query_attention
num_query_groups max_position_embeddings position_embedding_type rotary_base rotary_percent
rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor
normalization norm_epsilon add_qkv_bias qk_layernorm qk_l2_norm window_size window_attn_skip_freq
swiglu quick_geglu activation_func_clamp_value glu_linear_offset squared_relu quick_gelu openai_gelu
disable_bias_linear softmax_type
untie_embeddings_and_output_weights num_experts multi_latent_attention hybrid_layer_pattern
"""

OF_EXPERTS = """
moe_layer_freq moe_router_topk moe_ffn_hidden_size moe_shared_expert_intermediate_size
moe_shared_expert_gate moe_router_score_function moe_router_pre_softmax
moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk
moe_router_enable_expert_bias moe_apply_probs_on_input
"""

OF_LATENTS = "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim"

OF_YARN = """
yarn_rotary_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow
yarn_mscale yarn_mscale_all_dim yarn_correction_range_round_to_int
"""

OF_MAMBA = "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads"

ONLY_WITH: tuple[tuple[str, Callable[[TransformerConfig], bool]], ...] = (
    (OF_EXPERTS, lambda model: model.experts.enabled),
    (OF_LATENTS, lambda model: model.latent.enabled),
    (OF_YARN, lambda model: model.stretched_by_yarn),
    (OF_MAMBA, lambda model: model.model_type == "mamba"),
)
"""Options of parts that only some models have, and whether one has them. To others they say
nothing, as in Megatron-LM."""

COMPARED = frozenset(
    name.replace("_", "-")
    for names in (OF_ALL, *(names for names, _ in ONLY_WITH))
    for name in names.split()
)
"""Options that decide what a trained model computes. Others are of the training alone, such as
dropout, or choose kernels."""

LEARNED = "learned_absolute"

DERIVED = {
    "ffn_hidden_size": "ffn_size",
    "kv_channels": "head_dim",
    "num_query_groups": "query_groups",
    "max_position_embeddings": "positions",
    "moe_ffn_hidden_size": "expert_ffn_size",
    "mamba_num_heads": "mamba_heads",
    "hybrid_layer_pattern": "layer_kinds",
}
"""Options with a default that follows from others, and the property with the value."""


def check_expected(expect: Sequence[str], model: TransformerConfig, where: str) -> None:
    """Raise ConfigError with every option that the model has with another value.

    expect: NAME=VALUE, a switch as true or false. where: names the checkpoint."""
    options, differing = to_dict(model), []
    for entry in expect:
        name, _, text = entry.partition("=")
        if name.replace("_", "-") not in COMPARED:
            raise ConfigError(f"--expect {entry}: {name!r} is not an option that describes a model")
        if not _applies(name, model):
            continue
        value = getattr(model, DERIVED[name], None) if name in DERIVED else options.get(name)
        if not _same(name, value, text, model):
            differing.append(f"{flag(name)} is {_shown(value)}, not {text}")
    if differing:
        raise ConfigError(f"{where}: its {'; its '.join(differing)}; leave out what differs")


def _applies(name: str, model: TransformerConfig) -> bool:
    """Whether an option says something about a model of this kind."""
    if name == "max_position_embeddings":
        return model.position_embedding_type == LEARNED  # else no table has this length
    return all(has(model) for names, has in ONLY_WITH if name in names.split())


def _same(name: str, value: object, text: str, model: TransformerConfig) -> bool:
    if name == "moe_layer_freq":  # a number or a list may say the same
        return every_nth(text, model.num_layers, flag(name)) == model.experts.pattern(
            model.num_layers
        )
    if name == "hybrid_layer_pattern":  # its | are the stages of the run
        text = text.replace("|", "")
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(text) == value
        except ValueError:
            return False
    return _shown(value) == text


def _shown(value: object) -> str:
    if value is None:
        return "not set"
    return str(value).lower() if isinstance(value, bool) else str(value)
