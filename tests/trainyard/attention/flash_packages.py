"""Stand-ins for the flash-attn packages over keys in blocks: their arguments, and what their
docstrings say of them, in plain torch."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

Window = tuple[int | None, int | None]


def over_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    cu_seqlens_q: Tensor,
    lengths: Tensor,
    scale: float,
    causal: bool,
    window: Window,
    sink: Tensor | None = None,
) -> Tensor:
    """Query i of a sequence sees keys [i + t - s - left, i + t - s + right] of its pages, those up
    to i + t - s if causal. All rows of a page are multiplied, by 0 where they are not seen."""
    assert table.dtype == cu_seqlens_q.dtype == lengths.dtype == torch.int32
    left, right = (None if side == -1 else side for side in window)
    parts = []
    for row, t in enumerate(lengths.tolist()):
        queries = q[cu_seqlens_q[row] : cu_seqlens_q[row + 1]]
        pages = table[row, : -(-t // k.shape[1])].long()
        keys, values = (
            x[pages].flatten(0, 1).repeat_interleave(q.shape[1] // x.shape[2], dim=1)
            for x in (k, v)
        )
        middle = torch.arange(len(queries))[:, None] + t - len(queries)
        key = torch.arange(len(keys))
        seen = (key < t) & ((key <= middle) | torch.tensor(not causal))
        if left is not None:
            seen &= key >= middle - left
        if right is not None:
            seen &= key <= middle + right
        scores = torch.einsum("snd,tnd->nst", queries, keys) * scale
        scores = scores.masked_fill(~seen, -torch.inf)
        if sink is not None:
            scores = torch.cat((scores, sink[:, None, None].expand(-1, len(queries), 1)), -1)
        weights = scores.softmax(-1)[..., : len(keys)]
        parts.append(torch.einsum("nst,tnd->snd", weights, values))
    return torch.cat(parts)


def generation_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    block_table: Any = None,
) -> Tensor:
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert q.shape[2] == k.shape[3] == v.shape[3]
    assert cu_seqlens_k.dtype == torch.int32
    lengths = cu_seqlens_k.diff()
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    assert max_seqlen_k >= int(lengths.max())
    return over_pages(
        q, k, v, block_table, cu_seqlens_q, lengths, softmax_scale, causal, window_size
    )


def generation_3(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    max_seqlen_q: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
) -> Tensor:
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    given = (cu_seqlens_q, cache_seqlens, softmax_scale, causal, window_size)
    return over_pages(q, k_cache, v_cache, page_table, *given)


def generation_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    seqused_k: Any = None,
    page_table: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Any = None,
) -> tuple[Tensor, None]:
    assert -1 not in window_size, "no bound is None here"
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    assert max_seqlen_k >= int(seqused_k.max())
    given = (cu_seqlens_q, seqused_k, softmax_scale, causal, window_size, learnable_sink)
    return over_pages(q, k, v, page_table, *given), None


MODULES: dict[int, dict[str, dict[str, Any]]] = {
    2: {"flash_attn": {"flash_attn_varlen_func": generation_2}},
    3: {"flash_attn_interface": {"flash_attn_with_kvcache": generation_3}},
    4: {"flash_attn": {}, "flash_attn.cute": {"flash_attn_varlen_func": generation_4}},
}


def install(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """Put the stand-in for a generation where the package would be."""
    for name, functions in MODULES[version].items():
        module = ModuleType(name)
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, module)
