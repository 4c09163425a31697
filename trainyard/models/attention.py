"""Self-attention with grouped queries, and its interface to a key-value cache.

s new tokens, t tokens seen, b batch, h hidden, n query heads, g key and value heads, d head
channels; n and g are those of this tensor-parallel rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainyard.attention.base import Numerics, Softmax
from trainyard.attention.layer_state import StateCache
from trainyard.attention.masks import CAUSAL, AttentionMask
from trainyard.attention.paged import attends_in_rows, paged_attention, row_attention
from trainyard.attention.paged_cache import PagedKVCache
from trainyard.attention.select import KernelChoice, Key, Needs, Request, Selected, backend_table
from trainyard.errors import ConfigError
from trainyard.models.bias_grads import gives_bias_grads, split_heads
from trainyard.models.config import TransformerConfig
from trainyard.models.context_attention import ContextAttention, check_context
from trainyard.models.norm import L2Norm, build_norm
from trainyard.models.recompute import recomputed
from trainyard.models.rope import Rotary, apply_rotary
from trainyard.parallel.model import ALONE, ModelParallel
from trainyard.parallel.sharding import even_shard, mark_interleaved, mark_shard
from trainyard.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear

log = logging.getLogger(__name__)


class KVCache(Protocol):
    """Keys and values of the tokens before this call, one row for each sequence of the batch, and
    the states of layers that keep those instead."""

    @property
    def states(self) -> StateCache:
        """Of the layers that have `state_shapes`."""

    def positions(self, num_new: int) -> Tensor:
        """(b, s) positions of `num_new` further tokens of each sequence."""

    def mask(self, num_new: int) -> Tensor | None:
        """(b, 1, s, t) True where a new token may look; None for plain causal, where the new tokens
        are the last of t in every row."""

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v, (b, g, s, d), and return all stored keys and values, (b, g, t, d)."""


class SelfAttention(nn.Module):
    """linear_qkv, scaled dot-product attention, linear_proj.

    Rows of linear_qkv are ordered by query group: its n/g query heads, its key, its value. Tensor
    parallelism shards them between groups."""

    def __init__(
        self, config: TransformerConfig, layer: int, parallel: ModelParallel = ALONE
    ) -> None:
        super().__init__()
        self.layer = layer
        self.parallel = parallel
        self.groups = own_groups(config, parallel)
        heads = own_heads(config, parallel)
        self.queries_per_group = heads // self.groups
        self.head_dim = config.head_dim
        qkv_size = config.query_size + 2 * config.kv_size
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size, qkv_size, bias=config.qkv_bias, parallel=parallel
        )
        of_queries = self.queries_per_group * self.head_dim
        mark_interleaved(self.linear_qkv.weight, (of_queries, self.head_dim, self.head_dim))
        self.q_layernorm: nn.Module | None = None
        self.k_layernorm: nn.Module | None = None
        if config.qk_l2_norm:
            self.q_layernorm = L2Norm(config.norm_epsilon)
            self.k_layernorm = L2Norm(config.norm_epsilon)
        elif config.qk_layernorm:
            self.q_layernorm = build_norm(config, parallel, size=config.head_dim, of_head=True)
            self.k_layernorm = build_norm(config, parallel, size=config.head_dim, of_head=True)
        self.core_attention = CoreAttention(config, layer, parallel)
        self.linear_proj = RowParallelLinear(
            config.query_size, config.hidden_size, bias=config.linear_bias, parallel=parallel
        )

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None = None,
        mask: AttentionMask = CAUSAL,
        kv_cache: KVCache | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """x: (s, b, h), (s / tp, b, h) under sequence parallelism. mask: of the whole sequence
        under context parallelism. bias: (1, n, s, s) added to the scores. Returns a tensor like
        x."""
        gives_bias_grad = rotary is None and self._gives_bias_grad(x)
        qkv = self.linear_qkv(x, bias_grad=not gives_bias_grad)
        q, k, v = self._split_heads(qkv, self.linear_qkv.bias if gives_bias_grad else None)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        if rotary is not None:
            q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        if isinstance(kv_cache, PagedKVCache):
            kv_cache.write(self.layer, k[:, 0], v[:, 0])
            over: Tensor = self.linear_proj(self.core_attention.over_blocks(q, kv_cache).flatten(2))
            return over
        q, k, v = (heads.permute(1, 2, 0, 3) for heads in (q, k, v))  # (b, n or g, s, d)
        if kv_cache is not None:
            mask = self.core_attention.mask_of_cache(mask, kv_cache, q.shape[2])
            k, v = kv_cache.extend(self.layer, k, v)
        context = self.core_attention.attend(q, k, v, mask, bias)
        context = context.permute(2, 0, 1, 3).flatten(2)  # (s, b, n d)
        out: Tensor = self.linear_proj(context)
        return out

    def _gives_bias_grad(self, x: Tensor) -> bool:
        """Whether the split does. A compiler fuses its backward with that of norms and rotations,
        and with casts to 8 bits."""
        linear = self.linear_qkv
        alone = self.q_layernorm is None and linear.fp8 is None
        return linear.bias is not None and alone and gives_bias_grads(x)

    def _split_heads(self, qkv: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """bias: of linear_qkv, which gets its gradient here; None: in the product."""
        s, b = qkv.shape[:2]
        per_group = self.queries_per_group
        qkv = qkv.view(s, b, self.groups, per_group + 2, self.head_dim)
        if bias is None:
            q, k, v = torch.split(qkv, [per_group, 1, 1], dim=3)
        else:
            q, k, v = split_heads(qkv, bias)
        return q.reshape(s, b, -1, self.head_dim), k.squeeze(3), v.squeeze(3)


class CoreAttention(nn.Module):
    """Softmax attention by the chosen backend, over all context-parallel ranks.

    cross: queries are of another sequence than keys, without windows and relative positions."""

    def __init__(
        self,
        config: TransformerConfig,
        layer: int,
        parallel: ModelParallel = ALONE,
        *,
        cross: bool = False,
    ) -> None:
        super().__init__()
        self.layer, self.parallel = layer, parallel
        self.recompute = config.recomputes("core_attn")
        self.dropout = config.attention_dropout
        self.scale = config.attention_scale
        self.window = None if cross else config.attention_window(layer)
        self.softmax_type = config.softmax_type
        heads = own_heads(config, parallel)
        check_context(parallel.cp_comm_type, parallel.cp_size, heads, self.window)
        self.softmax_offset: nn.Parameter | None = None
        if config.softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.empty(heads))
            if parallel.tp is not None:
                shape = (config.num_attention_heads,)
                shard = even_shard(shape, 0, parallel.tp_size, parallel.tp_rank)
                mark_shard(self.softmax_offset, shard)
        self.backends = backends_of(config, layer, parallel, cross=cross)
        if parallel.cp is not None:
            self.backends = {
                key: replace(selected, backend=ContextAttention.around(selected, parallel))
                for key, selected in self.backends.items()
            }

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, bias: Tensor | None = None
    ) -> Tensor:
        """`forward`, recomputed in the backward pass with --recompute-modules core_attn."""
        if self.recompute and self.training and torch.is_grad_enabled():
            out: Tensor = recomputed(self, q, k, v, mask, bias, draws=self.dropout > 0)
        else:
            out = self(q, k, v, mask, bias)
        return out

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, bias: Tensor | None = None
    ) -> Tensor:
        """q: (b, n, s, d); k: (b, g, t, d); v: (b, g, t, d_v); bias: (1, n, s, t). Returns
        (b, n, s, d_v).

        Most kernels want heads of one width: narrower ones are filled up with zeros, which change
        neither scores nor sums."""
        backend = self.backends[q.device.type, q.dtype, mask.bounds is not None].get()
        dropout_p = self.dropout if self.training else 0.0
        softmax = Softmax(self.scale, dropout_p, self._sink(q), bias)
        if mask.lengths is not None and bias is None and attends_in_rows(q, v):
            return row_attention(q, k, v, mask.lengths, softmax, self.window)
        width, value_width = max(q.shape[-1], v.shape[-1]), v.shape[-1]
        q, k, v = _widened(q, width), _widened(k, width), _widened(v, width)
        out = backend.attend(q, k, v, mask.with_window(self.window), softmax)
        return out if value_width == width else out[..., :value_width]

    def over_blocks(self, q: Tensor, kv_cache: PagedKVCache) -> Tensor:
        """Attention of the new tokens of all sequences of a step, whose keys are in the cache.

        q: (s, 1, n, d). Returns (s, 1, n, d_v)."""
        keys, values = kv_cache.blocks(self.layer)
        softmax = Softmax(self.scale, sink=self._sink(q[:, 0]))
        layout, version = kv_cache.layout, kv_cache.flash_version
        rows = paged_attention(q[:, 0], keys, values, layout, softmax, self.window, version)
        return rows.unsqueeze(1)

    def mask_of_cache(self, mask: AttentionMask, kv_cache: KVCache, num_new: int) -> AttentionMask:
        """Sequences in a cache differ in length; a window needs their positions."""
        if self.window is None or mask.dense is None:
            return mask
        return replace(mask, positions=kv_cache.positions(num_new))

    def _sink(self, q: Tensor) -> Tensor | None:
        """(n) score of an extra key of value 0; off by one, the score is 0 too."""
        if self.softmax_type == "off-by-one":
            return q.new_zeros(q.shape[1])
        return self.softmax_offset


def _widened(x: Tensor, width: int) -> Tensor:
    """x with zeros in the channels behind its own."""
    return x if x.shape[-1] == width else functional.pad(x, (0, width - x.shape[-1]))


def own_heads(config: TransformerConfig, parallel: ModelParallel) -> int:
    """Query heads of this rank; ConfigError if tensor-parallel ranks cannot share them."""
    return _share(config.num_attention_heads, "--num-attention-heads", parallel)


def own_groups(config: TransformerConfig, parallel: ModelParallel) -> int:
    """Key and value heads of this rank; ConfigError if tensor-parallel ranks cannot share them."""
    return _share(config.query_groups, "--num-query-groups", parallel)


def _share(count: int, option: str, parallel: ModelParallel) -> int:
    """Heads of this rank; ConfigError if they do not divide."""
    share, rest = divmod(count, parallel.tp_size)
    if rest:
        raise ConfigError(
            f"{option} ({count}) must be divisible by --tensor-model-parallel-size "
            f"({parallel.tp_size})"
        )
    return share


def backends_of(
    config: TransformerConfig, layer: int, parallel: ModelParallel, *, cross: bool = False
) -> Mapping[Key, Selected]:
    """The backends of layer `layer`, counted from 0 over the whole model; cross: of its
    cross-attention."""
    request: Request = "flash" if config.use_flash_attn else config.attention_backend
    # Kernels keep scores in fp32, where scaling them by the layer and back does nothing; without it
    # all layers are alike, and are compiled once.
    scaled = config.apply_query_key_layer_scaling and request == "local"
    needs = Needs(
        head_dim=max(config.head_dim, config.value_dim),
        window=not cross and config.attention_window(layer) is not None,
        bias=not cross and config.position_embedding_type == "relative",
        sink=config.softmax_type != "vanilla",
        dropout=config.attention_dropout > 0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        context=None if parallel.cp is None else parallel.cp_comm_type,
    )
    numerics = Numerics(config.attention_softmax_in_fp32, layer + 1 if scaled else 1)
    return backend_table(request, needs, numerics)


def choose_attention(
    config: TransformerConfig,
    parallel: ModelParallel,
    device: torch.device,
    dtype: torch.dtype,
    *,
    documents: bool = False,
    report: bool = False,
) -> list[KernelChoice]:
    """The different backends that the layers will use; ConfigError if one is unavailable.

    documents: samples are packed documents. report: log each backend and why it was chosen."""
    layers: dict[KernelChoice, int] = {}
    for layer in filter(config.has_attention, range(config.num_layers)):
        selected = backends_of(config, layer, parallel)[device.type, dtype, documents]
        selected.get()
        assert selected.choice is not None
        layers[selected.choice] = layers.get(selected.choice, 0) + 1
    for choice, count in layers.items() if report else ():
        where = "" if len(layers) == 1 else f" layers={count}"
        log.info(
            "attention backend=%s kernel=%s%s: %s",
            *(choice.backend, choice.kernel, where, choice.reason),
        )
    return list(layers)
