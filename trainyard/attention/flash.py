"""The flash-attn package: FlashAttention 2, 3 (Hopper) and 4 (Hopper and Blackwell).

Generations differ in argument names only. Packed documents use the variable-length kernels; windows
are built in.

b batch, n query heads, g key and value heads, s queries, t keys, d head channels."""

from __future__ import annotations

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
        package, options = package_of(self.version), self._options(mask, softmax)
        tensors = [x.transpose(1, 2) for x in (q, k, v)]  # (b, s, n, d)
        if mask.bounds is None:
            return output_of(package.flash_attn_func(*tensors, **options)).transpose(1, 2)
        s, t = q.shape[2], k.shape[2]
        query_lengths, key_lengths = packed_lengths(mask, s, t)
        out = package.flash_attn_varlen_func(
            *(x.flatten(0, 1) for x in tensors),
            cu_seqlens_q=query_lengths,
            cu_seqlens_k=key_lengths,
            max_seqlen_q=s,
            max_seqlen_k=t,
            **options,
        )
        heads: Tensor = output_of(out).unflatten(0, (q.shape[0], s)).transpose(1, 2)
        return heads

    def _options(self, mask: AttentionMask, softmax: Softmax) -> dict[str, Any]:
        window = mask.window or (NO_BOUND, NO_BOUND)
        if mask.causal and mask.window is not None:
            window = (mask.window[0], 0)
        options: dict[str, Any] = {"softmax_scale": softmax.scale, "causal": mask.causal}
        if self.version != 4:
            options["deterministic"] = self.deterministic
        if self.version == 2:
            options["dropout_p"] = softmax.dropout_p
        else:
            assert softmax.dropout_p == 0.0, "not chosen with dropout"
        return options | {"window_size": window_of(self.version, window)}


def package_of(version: int) -> Any:
    """The module with the functions of a generation."""
    # Imported here: the package is optional, and takes seconds.
    if version == 4:
        import flash_attn.cute as package  # type: ignore[import-not-found]
    elif version == 3:
        import flash_attn_interface as package  # type: ignore[import-not-found]
    else:
        import flash_attn as package
    return package


def window_of(version: int, window: tuple[int, int]) -> tuple[int | None, int | None]:
    """A window of `AttentionMask` as a generation writes it."""
    if version != 4:
        return window
    left, right = (None if side == NO_BOUND else side for side in window)
    return left, right


def output_of(returned: Any) -> Tensor:
    """The output; newer versions return the log-sum-exp with it."""
    out: Tensor = returned[0] if isinstance(returned, tuple) else returned
    return out
