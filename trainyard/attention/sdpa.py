"""torch's scaled dot-product attention with a chosen kernel, and direct calls of torch's kernels
for features it does not expose: windows, packed documents, sinks.

b batch, n query heads, g key and value heads, s queries, t keys, d head channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainyard.attention.base import Softmax
from trainyard.attention.blockwise import AttentionBlock, block_attention, causal_blocks
from trainyard.attention.lse_kernels import laid_out, order_in_memory
from trainyard.attention.masks import AttentionMask, materialise, packed_lengths
from trainyard.attention.one_query import one_query_attention
from trainyard.attention.varlen import varlen_attention

CUDNN, FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
EFFICIENT, MATH = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
ORDER = {
    "cudnn": [CUDNN, FLASH, EFFICIENT, MATH],
    "flash": [FLASH, CUDNN, EFFICIENT, MATH],
    "efficient": [EFFICIENT, MATH],
    "math": [MATH],
}
"""Kernels in order of preference; one requested by name has no fallback."""


@dataclass(frozen=True, slots=True)
class SdpaBackend:
    """A kernel of torch: cudnn, flash, efficient, math, or its CPU kernel."""

    kernel: str
    strict: bool = False

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, softmax: Softmax
    ) -> Tensor:
        """See `AttentionBackend`."""
        s, t = q.shape[2], k.shape[2]
        if softmax.bias is not None:
            return self._with_bias(q, k, v, mask, softmax)
        if (
            self.kernel == "flash"
            and mask.rules_only
            and (softmax.sink is not None or not mask.plain)
        ):
            return _flash(q, k, v, mask, softmax)
        # A last token sees all keys.
        square = mask.plain and (s in (1, t) or not mask.causal)
        if softmax.sink is not None:
            return self._with_sink(q, k, v, mask, softmax)
        if square:
            return self._sdpa(q, k, v, None, mask.causal and s > 1, softmax)
        if s == 1 and mask.dense is not None and not softmax.dropout_p and not self.strict:
            allowed = materialise(mask, s, t, q.device)
            return one_query_attention(q, k, v, allowed, softmax.scale)
        if mask.plain and self.kernel in ("cudnn", "flash"):
            blocks = causal_blocks(0, s, t - s)
            return block_attention(q, k, v, blocks, self.kernel, softmax)
        dense = materialise(mask, s, t, q.device)
        return self._sdpa(q, k, v, dense, False, softmax)

    def _sdpa(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dense: Tensor | None,
        causal: bool,
        softmax: Softmax,
    ) -> Tensor:
        scale, dropout_p = softmax.scale, softmax.dropout_p
        grouped = q.shape[1] != k.shape[1]
        if self.kernel == "cpu":
            return functional.scaled_dot_product_attention(
                q, k, v, dense, dropout_p, causal, scale=scale, enable_gqa=grouped
            )
        kernels = ORDER[self.kernel][:1] if self.strict else ORDER[self.kernel]
        if dense is not None and self.kernel != "math":
            kernels = ORDER["efficient"]
        if grouped and EFFICIENT in kernels[:1]:  # it alone has no grouped heads
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            grouped = False
        with sdpa_kernel(kernels, set_priority=True):
            out = functional.scaled_dot_product_attention(
                q, k, v, dense, dropout_p, causal, scale=scale, enable_gqa=grouped
            )
        return even_gradient(out, q) if CUDNN in kernels and q.is_cuda else out

    def _with_bias(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, softmax: Softmax
    ) -> Tensor:
        """Adds the bias as a mask of numbers, -inf where a query may not look."""
        assert softmax.bias is not None
        assert softmax.sink is None, "scores with a bias have no sink"
        allowed = materialise(mask, q.shape[2], k.shape[2], q.device)
        added = softmax.bias.to(q.dtype)
        if allowed is not None:
            added = added.masked_fill(~allowed, -torch.inf)
        return self._sdpa(q, k, v, added, False, softmax)

    def _with_sink(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, softmax: Softmax
    ) -> Tensor:
        """Adds the sink through the log-sum-exp of a kernel."""
        s, t = q.shape[2], k.shape[2]
        kernel = self.kernel if self.kernel in ("cudnn", "cpu") else "math"
        blocks, dense = [AttentionBlock(0, s, 0, t, mask.causal)], None
        if mask.plain and mask.causal and s != t:
            blocks = causal_blocks(0, s, t - s)
        elif not mask.plain:
            blocks, dense = [AttentionBlock(0, s, 0, t)], materialise(mask, s, t, q.device)
            kernel = "math" if kernel == "cudnn" else kernel
        return block_attention(q, k, v, blocks, kernel, softmax, mask=dense)


class _EvenGradient(torch.autograd.Function):
    """What cuDNN gave out, whose gradient then has the same layout."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, order: tuple[int, ...]) -> Tensor:
        ctx.order = order
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return laid_out(dout, ctx.order), None


def even_gradient(out: Tensor, q: Tensor) -> Tensor:
    """`out`, whose gradient will have the layout that cuDNN gives an output for these queries."""
    even: Tensor = _EvenGradient.apply(out, order_in_memory(q))  # type: ignore[no-untyped-call]
    return even


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, softmax: Softmax) -> Tensor:
    """FlashAttention-2 with its own windows and documents; queries are the last of the keys."""
    s, t = q.shape[2], k.shape[2]
    window = mask.window or (-1, -1)
    if mask.bounds is not None:
        lengths = packed_lengths(mask, s, t)
        return varlen_attention(q, k, v, *lengths, softmax, causal=mask.causal, window=window)
    blocks = [AttentionBlock(0, s, 0, t, mask.causal)]
    return block_attention(q, k, v, blocks, "flash", softmax, window=window)
