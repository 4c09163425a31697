"""Causal self-attention with grouped queries, and what it asks of a cache of keys and values.

s new tokens, t tokens seen, b batch, h hidden, n query heads, g key and value heads, d head
channels."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainyard.models.config import GPTConfig
from trainyard.models.linear import Linear
from trainyard.models.rope import apply_rotary


class KVCache(Protocol):
    """Keys and values of the tokens before this call, one row for each sequence of the batch."""

    def positions(self, num_new: int) -> Tensor:
        """(b, s) places that `num_new` tokens of each sequence take."""

    def mask(self, num_new: int) -> Tensor | None:
        """(b, 1, s, t) True where a new token may look; None where that is plain causal, s = t."""

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v, (b, g, s, d), and return all that is held, (b, g, t, d)."""


def document_mask(bounds: Tensor) -> Tensor:
    """Causal attention that stops at documents: what `--reset-attention-mask` asks for.

    bounds: (b, s + 1), the place at which each document of a row begins, and s in every entry
    behind the last: `cu_seqlens` of packed sequences. Returns (b, 1, s, s), True where allowed."""
    begun = torch.zeros(bounds.shape, dtype=torch.int32, device=bounds.device)
    begun.scatter_(1, bounds.long(), 1)
    document = begun[:, :-1].cumsum(dim=1)
    same = document.unsqueeze(2) == document.unsqueeze(1)
    return same.tril().unsqueeze(1)


class SelfAttention(nn.Module):
    """linear_qkv, scaled dot-product attention, linear_proj.

    Rows of linear_qkv lie per query group: its n/g query heads, then its key, then its value."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.groups = config.query_groups
        self.queries_per_group = config.num_attention_heads // config.query_groups
        self.head_dim = config.head_dim
        self.dropout = config.attention_dropout
        qkv_size = config.query_size + 2 * config.kv_size
        self.linear_qkv = Linear(config.hidden_size, qkv_size, bias=config.qkv_bias)
        self.linear_proj = Linear(config.query_size, config.hidden_size, bias=config.linear_bias)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        kv_cache: KVCache | None,
    ) -> Tensor:
        """x: (s, b, h). mask: (b, 1, s, t) or None for plain causal. Returns (s, b, h)."""
        q, k, v = self._split_heads(self.linear_qkv(x))
        if rotary is not None:
            q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        q, k, v = (heads.permute(1, 2, 0, 3) for heads in (q, k, v))  # (b, n or g, s, d)
        if kv_cache is not None:
            k, v = kv_cache.extend(self.layer, k, v)
        out: Tensor = self.linear_proj(self._attend(q, k, v, mask))
        return out

    def _split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s, b = qkv.shape[:2]
        per_group = self.queries_per_group
        qkv = qkv.view(s, b, self.groups, per_group + 2, self.head_dim)
        q, k, v = torch.split(qkv, [per_group, 1, 1], dim=3)
        return q.reshape(s, b, -1, self.head_dim), k.squeeze(3), v.squeeze(3)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        context = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None,
            enable_gqa=self.queries_per_group > 1,
        )
        return context.permute(2, 0, 1, 3).flatten(2)  # (s, b, n d)


def causal_mask(positions: Tensor, num_seen: int) -> Tensor:
    """(b, 1, s, t) True where key j <= the position of the query. positions: (b, s)."""
    keys = torch.arange(num_seen, device=positions.device)
    return (keys <= positions.unsqueeze(-1)).unsqueeze(1)
