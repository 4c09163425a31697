"""Converts Megatron-LM's arguments of multi-latent attention, of multi-token prediction and of
gpt-oss's activation to our options, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainyard.errors import ConfigError
from trainyard.models.config import TransformerConfig

OF_LATENTS = (
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim"),
    *("qk_pos_emb_head_dim", "v_head_dim"),
)
OF_PREDICTION = ("mtp_num_layers", "mtp_loss_scaling_factor")
OF_ACTIVATION = ("activation_func_clamp_value", "glu_linear_offset")
"""Fields of ours that are arguments of the same name and meaning."""

YARN = {
    "rotary_scaling_factor": "yarn_rotary_scaling_factor",
    "mscale": "yarn_mscale",
    "mscale_all_dim": "yarn_mscale_all_dim",
    "original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
"""Arguments, and fields of MLATransformerConfig, and ours. The last three are no flags."""
FIXED = tuple(YARN)[3:]


def latents_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """The options, if the model has any of these."""
    found = {name: args[name] for name in OF_ACTIVATION if args.get(name) is not None}
    if args.get("mtp_num_layers"):
        found |= {name: args[name] for name in OF_PREDICTION if args.get(name) is not None}
    if args.get("multi_latent_attention"):
        found |= {name: args[name] for name in OF_LATENTS if args.get(name) is not None}
        found |= {ours: args[name] for name, ours in YARN.items() if args.get(name) is not None}
        found["kv_channels"] = None
        if args.get("rope_type") == "rope":
            found["yarn_rotary_scaling_factor"] = 1.0
    integers = {*OF_LATENTS, "mtp_num_layers", YARN["original_max_position_embeddings"]}
    return {
        name: float(value) if type(value) is int and name not in integers else value
        for name, value in found.items()
    }


def latent_args(config: TransformerConfig) -> dict[str, Any]:
    """The arguments. Raises ConfigError for a rotation that Megatron-LM has no flag for."""
    found: dict[str, Any] = {name: getattr(config, name) for name in OF_ACTIVATION}
    found |= {name: getattr(config.mtp, name) for name in OF_PREDICTION}
    found |= {name: getattr(config.latent, name) for name in OF_LATENTS}
    if not config.latent.enabled:
        return found
    fields = type(config).__dataclass_fields__
    moved = [
        f"--{YARN[name].replace('_', '-')} {getattr(config, YARN[name])}"
        for name in FIXED
        if getattr(config, YARN[name]) != fields[YARN[name]].default
    ]
    if moved and config.yarn_rotary_scaling_factor != 1.0:
        raise ConfigError(
            f"with --multi-latent-attention Megatron-LM has no flag for {', '.join(moved)}; use "
            "--saver hf, or keep the checkpoint in our format (--saver trainyard)"
        )
    found |= {name: getattr(config, ours) for name, ours in YARN.items()}
    return found | {"rope_type": "yarn", "position_embedding_type": "rope", "kv_channels": None}
