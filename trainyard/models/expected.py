"""Options that a command expects of the model in a checkpoint: NAME=VALUE, as its command line says
them. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence

from trainyard.config import flag
from trainyard.errors import ConfigError
from trainyard.models.config import TransformerConfig

_COMPARED = """
num_layers hidden_size num_attention_heads ffn_hidden_size kv_channels group_query_attention
num_query_groups max_position_embeddings position_embedding_type rotary_base rotary_percent
rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor
normalization norm_epsilon add_qkv_bias qk_layernorm window_size window_attn_skip_freq swiglu
quick_geglu activation_func_clamp_value glu_linear_offset squared_relu quick_gelu openai_gelu
disable_bias_linear softmax_type
untie_embeddings_and_output_weights
"""
COMPARED = frozenset(name.replace("_", "-") for name in _COMPARED.split())
"""Options that decide what a trained model computes. Others are of the training alone, such as
dropout, or choose kernels."""

LEARNED = "learned_absolute"

DERIVED = {
    "ffn_hidden_size": "ffn_size",
    "kv_channels": "head_dim",
    "num_query_groups": "query_groups",
    "max_position_embeddings": "positions",
}
"""Options with a default that follows from others, and the property with the value."""


def check_expected(expect: Sequence[str], model: TransformerConfig, where: str) -> None:
    """Raise ConfigError with every option that the model has with another value.

    expect: NAME=VALUE, a switch as true or false. where: names the checkpoint."""
    differing = []
    for entry in expect:
        name, _, text = entry.partition("=")
        if name.replace("_", "-") not in COMPARED:
            raise ConfigError(f"--expect {entry}: {name!r} is no option that a model is known by")
        if name == "max_position_embeddings" and model.position_embedding_type != LEARNED:
            continue  # no table of positions has this length
        value = getattr(model, DERIVED.get(name, name))
        if not _same(value, text):
            differing.append(f"{flag(name)} is {_shown(value)}, not {text}")
    if differing:
        raise ConfigError(f"{where}: its {'; its '.join(differing)}; leave out what differs")


def _same(value: object, text: str) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(text) == value
        except ValueError:
            return False
    return _shown(value) == text


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
