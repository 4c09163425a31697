"""Sizes of attention that follow from the options of a model. Standard library only."""

from __future__ import annotations

import math
from typing import Literal

from trainyard.models.latent_config import NO_LATENTS, LatentConfig

PositionEmbeddingType = Literal["learned_absolute", "rope", "yarn", "relative", "none"]


class AttentionSizes:
    """Properties of a `TransformerConfig`."""

    hidden_size: int
    num_attention_heads: int
    kv_channels: int | None
    group_query_attention: bool
    num_query_groups: int
    position_embedding_type: PositionEmbeddingType
    rotary_percent: float
    rotary_interleaved: bool
    yarn_rotary_scaling_factor: float
    yarn_mscale_all_dim: float

    @property
    def latent(self) -> LatentConfig:
        """Options of multi-latent attention; most families have none."""
        return NO_LATENTS

    # --- heads ----------------------------------------------------------------------------

    @property
    def head_dim(self) -> int:
        """Channels of a query or key head."""
        if self.latent.enabled:
            return self.latent.head_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def value_dim(self) -> int:
        """Channels of a value head."""
        return self.latent.v_head_dim if self.latent.enabled else self.head_dim

    @property
    def query_groups(self) -> int:
        """Key and value heads: as many as query heads unless grouped."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.head_dim * self.num_attention_heads

    @property
    def kv_size(self) -> int:
        """Width of all key heads together; that of values alike, but for latents."""
        return self.head_dim * self.query_groups

    @property
    def value_size(self) -> int:
        """Width of all value heads together."""
        return self.value_dim * self.query_groups

    @property
    def context_size(self) -> int:
        """Width of what all query heads give out together."""
        return self.value_dim * self.num_attention_heads

    def cached_heads(self, tp: int = 1) -> tuple[tuple[int, int], tuple[int, int]]:
        """(heads, channels) of the two tensors that a cache keeps of each token on one of tp ranks:
        keys and values, or the latent and the shared part of the keys, whole on each rank."""
        if self.latent.enabled:
            return (1, self.latent.kv_lora_rank), (1, self.latent.qk_pos_emb_head_dim)
        groups = self.query_groups // tp
        return (groups, self.head_dim), (groups, self.value_dim)

    # --- rotation and scores --------------------------------------------------------------

    @property
    def rotary(self) -> bool:
        """Whether queries and keys rotate."""
        return self.position_embedding_type in ("rope", "yarn")

    @property
    def stretched_by_yarn(self) -> bool:
        """Whether rotation is that of YaRN; as in Megatron-LM, rope means YaRN to latents."""
        return self.position_embedding_type == "yarn" or (self.latent.enabled and self.rotary)

    @property
    def rotates_neighbours(self) -> bool:
        """Whether neighbouring channels rotate together, as those of latents do."""
        return self.rotary_interleaved or self.latent.enabled

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that rotate."""
        width = self.latent.qk_pos_emb_head_dim if self.latent.enabled else self.head_dim
        return int(width * self.rotary_percent)

    @property
    def attention_scale(self) -> float:
        """Factor of the scores of attention. With latents YaRN's growth is in it, squared, as far
        as it is not in the rotation (--mscale-all-dim)."""
        scale = 1.0 / math.sqrt(self.head_dim)
        if not self.latent.enabled:
            return scale
        stretch = math.log(max(self.yarn_rotary_scaling_factor, 1.0))
        return scale * (0.1 * self.yarn_mscale_all_dim * stretch + 1.0) ** 2
