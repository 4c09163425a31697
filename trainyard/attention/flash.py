"""The flash-attn package: FlashAttention 2, 3 (Hopper) and 4 (Hopper and Blackwell).

Generations differ in argument names only. Packed documents use the variable-length kernels; windows
are built in.

b batch, n query heads, g key and value heads, s queries, t keys, d head channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainyard.attention.base import Softmax
from trainyard.attention.masks import NO_BOUND, AttentionMask, packed_lengths
from trainyard.attention.sdpa import SdpaBackend

DENSE = SdpaBackend("efficient")
"""For dense masks, which the package does not support (a cache of ragged rows)."""


@dataclass(frozen=True, slots=True)
class FlashBackend:
    """Kernels of the installed major version of the package."""

    version: int
    deterministic: bool = False

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, softmax: Softmax
    ) -> Tensor:
        """See `AttentionBackend`."""
        assert softmax.sink is None, "not chosen with a sink"
        assert softmax.bias is None, "not chosen with relative positions"
        if not mask.rules_only:
            return DENSE.attend(q, k, v, mask, softmax)
        options = self._options(mask, softmax)
        tensors = [x.transpose(1, 2) for x in (q, k, v)]  # (b, s, n, d)
        if mask.bounds is None:
            return _first(self._kernel(packed=False)(*tensors, **options)).transpose(1, 2)
        s, t = q.shape[2], k.shape[2]
        query_lengths, key_lengths = packed_lengths(mask, s, t)
        out = self._kernel(packed=True)(
            *(x.flatten(0, 1) for x in tensors),
            cu_seqlens_q=query_lengths,
            cu_seqlens_k=key_lengths,
            max_seqlen_q=s,
            max_seqlen_k=t,
            **options,
        )
        heads: Tensor = _first(out).unflatten(0, (q.shape[0], s)).transpose(1, 2)
        return heads

    def _kernel(self, packed: bool) -> Callable[..., Any]:
        # Imported here: the package is optional, and takes seconds.
        if self.version == 4:
            from flash_attn.cute import (  # type: ignore[import-not-found]
                flash_attn_func,
                flash_attn_varlen_func,
            )
        elif self.version == 3:
            from flash_attn_interface import (  # type: ignore[import-not-found]
                flash_attn_func,
                flash_attn_varlen_func,
            )
        else:
            from flash_attn import (  # type: ignore[import-not-found]
                flash_attn_func,
                flash_attn_varlen_func,
            )
        kernel: Callable[..., Any] = flash_attn_varlen_func if packed else flash_attn_func
        return kernel

    def _options(self, mask: AttentionMask, softmax: Softmax) -> dict[str, Any]:
        window: tuple[int | None, int | None] = mask.window or (NO_BOUND, NO_BOUND)
        if mask.causal and mask.window is not None:
            window = (mask.window[0], 0)
        options: dict[str, Any] = {"softmax_scale": softmax.scale, "causal": mask.causal}
        if self.version == 4:
            window = tuple(None if side == NO_BOUND else side for side in window)  # type: ignore[assignment]
        else:
            options["deterministic"] = self.deterministic
        if self.version == 2:
            options["dropout_p"] = softmax.dropout_p
        else:
            assert softmax.dropout_p == 0.0, "not chosen with dropout"
        return options | {"window_size": window}


def _first(returned: Any) -> Tensor:
    """The output; newer versions return the log-sum-exp with it."""
    out: Tensor = returned[0] if isinstance(returned, tuple) else returned
    return out
