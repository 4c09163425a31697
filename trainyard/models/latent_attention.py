"""Multi-latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), and the choice between it
and `SelfAttention`.

A short vector of each token, its latent, is all that the keys and values of its heads are made
from, but for a few rotating channels of the keys that all heads share. A cache keeps the latent and
those channels, and makes keys and values of it again in every step.

s new tokens, t tokens seen, b batch, h hidden, n heads of this tensor-parallel rank, r width of the
latent, d still and e rotating channels of a query or key head, v channels of a value head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainyard.attention.masks import CAUSAL, AttentionMask
from trainyard.attention.paged_cache import PagedKVCache
from trainyard.models.attention import CoreAttention, KVCache, SelfAttention, own_heads
from trainyard.models.config import TransformerConfig
from trainyard.models.norm import build_norm
from trainyard.models.rope import Rotary, apply_rotary
from trainyard.parallel.model import ALONE, ModelParallel
from trainyard.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear, WholeLinear
from trainyard.parallel.tensor.mappings import copy_to_tp, gather_from_sp


def build_attention(config: TransformerConfig, layer: int, parallel: ModelParallel) -> nn.Module:
    """The self-attention of a layer."""
    kind = LatentAttention if config.latent.enabled else SelfAttention
    return kind(config, layer, parallel)


class LatentAttention(nn.Module):
    """Queries from the token or from a latent of their own (linear_q_*), keys and values from
    another (linear_kv_*), scaled dot-product attention, linear_proj.

    Rows of the matrices that make heads are ordered by head: a query's still, then its rotating
    channels; a key's still channels, then the value. Tensor parallelism shards them between heads.
    The matrices that make latents are whole on every rank."""

    def __init__(
        self, config: TransformerConfig, layer: int, parallel: ModelParallel = ALONE
    ) -> None:
        super().__init__()
        self.layer, self.parallel, self.latent = layer, parallel, config.latent
        self.heads = own_heads(config, parallel)
        self._add_queries(config)
        self._add_keys_and_values(config)
        self.core_attention = CoreAttention(config, layer, parallel)
        self.linear_proj = RowParallelLinear(
            config.context_size, config.hidden_size, bias=config.linear_bias, parallel=parallel
        )

    def _add_queries(self, config: TransformerConfig) -> None:
        h, rank, parallel = config.hidden_size, self.latent.q_lora_rank, self.parallel
        self.q_layernorm: nn.Module | None = None
        self.linear_q_proj: nn.Module | None = None
        if rank is None:
            self.linear_q_proj = ColumnParallelLinear(
                h, config.query_size, bias=False, parallel=parallel
            )
            return
        self.linear_q_down_proj = WholeLinear(h, rank, parallel)
        if config.qk_layernorm:
            self.q_layernorm = build_norm(config, parallel, size=rank)
        self.linear_q_up_proj = ColumnParallelLinear(
            rank, config.query_size, bias=False, parallel=parallel
        )

    def _add_keys_and_values(self, config: TransformerConfig) -> None:
        latent, parallel = self.latent, self.parallel
        rank = latent.kv_lora_rank
        self.linear_kv_down_proj = WholeLinear(
            config.hidden_size, rank + latent.qk_pos_emb_head_dim, parallel
        )
        self.kv_layernorm: nn.Module | None = None
        if config.qk_layernorm:
            self.kv_layernorm = build_norm(config, parallel, size=rank)
        width = config.num_attention_heads * (latent.qk_head_dim + latent.v_head_dim)
        self.linear_kv_up_proj = ColumnParallelLinear(rank, width, bias=False, parallel=parallel)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None = None,
        mask: AttentionMask = CAUSAL,
        kv_cache: KVCache | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Arguments and result as of `SelfAttention`; x: (s, b, h)."""
        assert rotary is not None, "the options have a rotary embedding"
        q = self._queries(x, rotary)
        latent, shared = self._latents(x, rotary)
        if isinstance(kv_cache, PagedKVCache):
            over: Tensor = self.linear_proj(self._over_blocks(q, latent, shared, kv_cache))
            return over
        if kv_cache is not None:
            mask = self.core_attention.mask_of_cache(mask, kv_cache, x.shape[0])
            latent, shared = self._cached(latent, shared, kv_cache)
        k, v = self._keys_and_values(latent, shared)
        q, k, v = (heads.permute(1, 2, 0, 3) for heads in (q, k, v))  # (b, n, s or t, ...)
        context = self.core_attention.attend(q, k, v, mask, bias)
        out: Tensor = self.linear_proj(context.permute(2, 0, 1, 3).flatten(2))
        return out

    def _queries(self, x: Tensor, rotary: Rotary) -> Tensor:
        """(s, b, n, d + e), of the whole sequence under sequence parallelism."""
        if self.linear_q_proj is not None:
            q: Tensor = self.linear_q_proj(x)
        else:
            latent = self.linear_q_down_proj(x)
            q = self.linear_q_up_proj(
                latent if self.q_layernorm is None else self.q_layernorm(latent)
            )
        still, rotating = q.unflatten(2, (self.heads, -1)).split(
            [self.latent.qk_head_dim, self.latent.qk_pos_emb_head_dim], dim=-1
        )
        return torch.cat((still, apply_rotary(rotating, *rotary)), dim=-1)

    def _latents(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """The latent (s, b, r), its part of s under sequence parallelism, and the channels that the
        keys of all heads share, (s, b, 1, e), always of the whole sequence."""
        both = self.linear_kv_down_proj(x)
        latent, shared = both.split(
            [self.latent.kv_lora_rank, self.latent.qk_pos_emb_head_dim], dim=-1
        )
        if self.kv_layernorm is not None:
            latent = self.kv_layernorm(latent)
        spread = gather_from_sp if self.parallel.sequence_parallel else copy_to_tp
        shared = spread(shared.contiguous(), self.parallel.tp).unsqueeze(2)
        return latent, apply_rotary(shared, *rotary)

    def _cached(self, latent: Tensor, shared: Tensor, kv_cache: KVCache) -> tuple[Tensor, Tensor]:
        """What `_latents` returns of all t tokens."""
        kept, shared = kv_cache.extend(
            self.layer, latent.transpose(0, 1).unsqueeze(1), shared.permute(1, 2, 0, 3)
        )
        return kept.squeeze(1).transpose(0, 1), shared.permute(2, 0, 1, 3)

    def _over_blocks(
        self, q: Tensor, latent: Tensor, shared: Tensor, kv_cache: PagedKVCache
    ) -> Tensor:
        """(s, 1, n v) attention to latents in blocks, of which no keys and values are made: what
        makes them is applied to the queries and to the sums of latents (section 2.1.2)."""
        kv_cache.write(self.layer, torch.cat((latent, shared[:, :, 0]), dim=-1), None)
        made = self.linear_kv_up_proj.weight.unflatten(0, (self.heads, -1))  # (n, d + v, r)
        of_keys, of_values = made.split([self.latent.qk_head_dim, self.latent.v_head_dim], dim=1)
        still, rotating = q.split(
            [self.latent.qk_head_dim, self.latent.qk_pos_emb_head_dim], dim=-1
        )
        still = torch.einsum("sbnd,ndr->sbnr", still, of_keys)
        sums = self.core_attention.over_blocks(torch.cat((still, rotating), dim=-1), kv_cache)
        return torch.einsum("sbnr,nvr->sbnv", sums, of_values).flatten(2)

    def _keys_and_values(self, latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (t, b, n, d + e) and values (t, b, n, v)."""
        made = self.linear_kv_up_proj(latent).unflatten(2, (self.heads, -1))
        still, v = made.split([self.latent.qk_head_dim, self.latent.v_head_dim], dim=-1)
        shared = shared.expand(-1, -1, self.heads, -1)
        return torch.cat((still, shared), dim=-1), v
