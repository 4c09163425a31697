"""Options of multi-latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), under
Megatron-LM's names. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainyard.config import MAX_SIZE, check_above_zero, check_at_most
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Keys and values that every head makes from one short vector of the token, its latent."""

    multi_latent_attention: bool = False
    """Compute the keys and values of all heads from one short vector per token, its latent
    (DeepSeek-V2)."""
    q_lora_rank: int | None = None
    """Width of the latent that queries are computed from; unset: queries are computed from the
    token itself."""
    kv_lora_rank: int = 32
    """Width of the latent that keys and values are computed from."""
    qk_head_dim: int = 128
    """Channels of a query or key head without rotary positions."""
    qk_pos_emb_head_dim: int = 64
    """Channels of a query or key head with rotary positions; all heads share those of a key."""
    v_head_dim: int = 128
    """Channels of a value head."""

    def __post_init__(self) -> None:
        """Raise ConfigError for impossible widths."""
        widths = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        check_above_zero(self, *widths)
        check_at_most(self, MAX_SIZE, *widths)
        if self.qk_pos_emb_head_dim % 2:
            raise ConfigError(
                f"--qk-pos-emb-head-dim ({self.qk_pos_emb_head_dim}) must be even, since channels "
                "rotate in pairs"
            )

    @property
    def enabled(self) -> bool:
        """Whether attention is by latents."""
        return self.multi_latent_attention

    @property
    def head_dim(self) -> int:
        """Channels of a query or key head."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim


NO_LATENTS = LatentConfig()


def check_latents(config: Any) -> None:
    """Raise ConfigError for options that multi-latent attention does not go with."""
    if not config.latent.enabled:
        return
    excluded = {
        "--group-query-attention": config.group_query_attention,
        "--add-qkv-bias": config.add_qkv_bias,
        "--qk-l2-norm": config.qk_l2_norm,
        "--rotary-interleaved": config.rotary_interleaved,
        "--use-rope-scaling": config.use_rope_scaling,
    }
    if given := [option for option, is_given in excluded.items() if is_given]:
        raise ConfigError(
            f"--multi-latent-attention has no {' and no '.join(given)}: --qk-head-dim, "
            "--qk-pos-emb-head-dim, --v-head-dim and --kv-lora-rank shape its heads, and YaRN "
            "stretches its rotation; leave it out"
        )
    if not config.rotary:
        raise ConfigError(
            "--multi-latent-attention applies rotary positions to a part of each head; give "
            "--position-embedding-type "
            f"rope or yarn, not {config.position_embedding_type}"
        )
