"""Transformer Engine's fused attention: cuDNN with windows and packed documents.

b batch, n query heads, g key and value heads, s queries, t keys, d head channels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from trainyard.attention.base import Softmax
from trainyard.attention.masks import AttentionMask, packed_lengths
from trainyard.attention.sdpa import SdpaBackend

FALLBACK = SdpaBackend("cudnn")
"""For a key-value cache (dense masks, queries that are the last of the keys), and for keys of
another sequence: Transformer Engine leaves the gradients of their padding as memory was."""


@dataclass(frozen=True, slots=True)
class TransformerEngineBackend:
    """`DotProductAttention`, one instance for each kind of layer."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, softmax: Softmax
    ) -> Tensor:
        """See `AttentionBackend`."""
        assert softmax.sink is None, "not chosen with a sink"
        assert softmax.bias is None, "not chosen with relative positions"
        s, t = q.shape[2], k.shape[2]
        if not mask.rules_only or s != t or mask.query_bounds is not None:
            return FALLBACK.attend(q, k, v, mask, softmax)
        core = _core(
            q.shape[1], k.shape[1], (q.shape[3], v.shape[3]), softmax.dropout_p, softmax.scale
        )
        kind = "causal" if mask.causal else "no_mask"
        window = mask.window or (-1, -1)
        if mask.causal:
            window = (window[0], 0)
        if mask.bounds is None:
            # It takes memory to be in the order of its format: that of projections, no copy.
            tensors = [x.permute(2, 0, 1, 3).contiguous() for x in (q, k, v)]  # (s, b, n, d)
            out = core(*tensors, qkv_format="sbhd", attn_mask_type=kind, window_size=window)
            heads: Tensor = out.reshape(s, q.shape[0], q.shape[1], -1).permute(1, 2, 0, 3)
            return heads
        query_lengths, key_lengths = packed_lengths(mask, s, t)
        out = core(
            *(x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q, k, v)),
            qkv_format="thd",
            attn_mask_type="padding_causal" if mask.causal else "padding",
            window_size=window,
            cu_seqlens_q=query_lengths,
            cu_seqlens_kv=key_lengths,
            max_seqlen_q=s,
            max_seqlen_kv=s,
        )
        heads = out.reshape(q.shape[0], s, q.shape[1], -1).transpose(1, 2)
        return heads


@lru_cache(maxsize=16)
def _core(n: int, g: int, channels: tuple[int, int], dropout_p: float, scale: float) -> Any:
    # Imported here: the package is optional, and takes seconds.
    from transformer_engine.pytorch import (  # type: ignore[import-not-found]
        DotProductAttention,
    )

    return DotProductAttention(
        n,
        channels if channels[0] != channels[1] else channels[0],
        num_gqa_groups=g,
        attention_dropout=dropout_p,
        softmax_scale=scale,
    )
