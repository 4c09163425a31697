"""Attention of one sequence to another: of a decoder to its encoder, of a text to its neighbors.

s queries, t keys, b batch, h hidden, n query heads, g key and value heads, d head channels; n and g
are those of this tensor-parallel rank."""

from __future__ import annotations

from collections.abc import MutableMapping

from torch import Tensor, nn

from trainyard.attention.masks import FULL, AttentionMask
from trainyard.errors import ConfigError
from trainyard.models.attention import CoreAttention, own_groups, own_heads
from trainyard.models.config import TransformerConfig
from trainyard.parallel.model import ALONE, ModelParallel
from trainyard.parallel.sharding import mark_interleaved
from trainyard.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear


class CrossAttention(nn.Module):
    """linear_q of the queries, linear_kv of the source, scaled dot-product attention, linear_proj.

    Rows of linear_kv are ordered by head: its key, its value. Tensor parallelism shards them
    between heads. source_size: width of the source; unset: the hidden size."""

    def __init__(
        self,
        config: TransformerConfig,
        layer: int,
        parallel: ModelParallel = ALONE,
        source_size: int | None = None,
    ) -> None:
        super().__init__()
        if parallel.cp_size > 1:
            raise ConfigError(
                f"--context-parallel-size {parallel.cp_size}: cross-attention does not cut "
                "sequences over ranks; leave the option out"
            )
        self.layer = layer
        self.head_dim = config.head_dim
        self.heads, self.groups = own_heads(config, parallel), own_groups(config, parallel)
        hidden, bias = config.hidden_size, config.linear_bias
        source = hidden if source_size is None else source_size
        self.linear_q = ColumnParallelLinear(
            hidden, config.query_size, bias=bias, parallel=parallel
        )
        self.linear_kv = ColumnParallelLinear(
            source, 2 * config.kv_size, bias=bias, parallel=parallel
        )
        mark_interleaved(self.linear_kv.weight, (self.head_dim, self.head_dim))
        self.core_attention = CoreAttention(config, layer, parallel, cross=True)
        self.linear_proj = RowParallelLinear(
            config.query_size, hidden, bias=bias, parallel=parallel
        )

    def forward(
        self,
        x: Tensor,
        source: Tensor,
        mask: AttentionMask = FULL,
        cache: MutableMapping[int, tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """x: (s, b, h), (s / tp, b, h) under sequence parallelism; source: (t, b, source size),
        likewise. mask: not causal, of whole sequences; see `cross_mask`. cache: see
        `LayerInputs.source_cache`. Returns a tensor like x."""
        assert not mask.causal, "queries and keys are different sequences"
        if cache is not None and self.layer in cache:
            k, v = cache[self.layer]
        else:
            k, v = self.keys_and_values(source)
            if cache is not None:
                cache[self.layer] = k, v
        return self.output(self.attend(self.queries(x), k, v, mask))

    # --- steps, between which heads may be arranged otherwise ---------------------------------

    def queries(self, x: Tensor) -> Tensor:
        """(s, b, n, d), of the whole sequence."""
        q: Tensor = self.linear_q(x).unflatten(2, (self.heads, self.head_dim))
        return q

    def keys_and_values(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """(t, b, g, d) each, of the whole sequence."""
        kv: Tensor = self.linear_kv(source)
        k, v = kv.unflatten(2, (self.groups, 2 * self.head_dim)).split(self.head_dim, dim=3)
        return k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """q: (s, b, n, d); k, v: (t, b, g, d). Returns (s, b, n, d)."""
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))  # (b, n or g, s or t, d)
        return self.core_attention.attend(q, k, v, mask).permute(2, 0, 1, 3)

    def output(self, context: Tensor) -> Tensor:
        """context: (s, b, n, d). Returns (s, b, h), its part of s under sequence parallelism."""
        out: Tensor = self.linear_proj(context.flatten(2))
        return out
