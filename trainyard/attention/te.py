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
"""For a key-value cache: dense masks, and queries that are the last of the keys."""


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
        if not mask.rules_only or s != t:
            return FALLBACK.attend(q, k, v, mask, softmax)
        core = _core(
            q.shape[1], k.shape[1], (q.shape[3], v.shape[3]), softmax.dropout_p, softmax.scale
        )
        tensors = [x.transpose(1, 2) for x in (q, k, v)]  # (b, s, n, d)
        kind = "causal" if mask.causal else "no_mask"
        window = mask.window or (-1, -1)
        if mask.causal:
            window = (window[0], 0)
        if mask.bounds is None:
            out = core(*tensors, qkv_format="bshd", attn_mask_type=kind, window_size=window)
            return _heads(out, q)
        query_lengths, key_lengths = packed_lengths(mask, s, t)
        out = core(
            *(x.flatten(0, 1).contiguous() for x in tensors),
            qkv_format="thd",
            attn_mask_type="padding_causal" if mask.causal else "padding",
            window_size=window,
            cu_seqlens_q=query_lengths,
            cu_seqlens_kv=key_lengths,
            max_seqlen_q=s,
            max_seqlen_kv=s,
        )
        return _heads(out, q)


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


def _heads(out: Tensor, q: Tensor) -> Tensor:
    """(b, s, n d) or (b s, n d) as (b, n, s, d)."""
    b, n, s = q.shape[:3]
    return out.reshape(b, s, n, -1).transpose(1, 2)
