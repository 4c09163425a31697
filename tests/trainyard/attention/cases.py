"""Inputs and masks for the tests of backends, and the answer written out in fp64."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from trainyard.attention.base import AttentionBackend, Numerics, Softmax
from trainyard.attention.local import LocalBackend
from trainyard.attention.masks import CAUSAL, FULL, AttentionMask

LOCAL = LocalBackend(Numerics())
B, N, D = 2, 4, 16


def bounds_of(s: int) -> Tensor:
    """Documents of two rows: three of different lengths, and one with a token at its end."""
    rows = [[0, s // 4, s // 2 + 1, s, s], [0, s - 1, s, s, s]]
    return torch.tensor(rows, dtype=torch.int32)


def masks(s: int) -> dict[str, AttentionMask]:
    """Every rule and some of them together."""
    return {
        "causal": CAUSAL,
        "full": FULL,
        "window": AttentionMask(window=(s // 4, 0)),
        "documents": AttentionMask(bounds=bounds_of(s)),
        "documents and window": AttentionMask(bounds=bounds_of(s), window=(s // 5, 0)),
        "matrix": AttentionMask(
            causal=False, dense=torch.ones(s, s).tril(s // 8).bool()[None, None]
        ),
    }


KINDS = list(masks(8))


def to(mask: AttentionMask, device: str) -> AttentionMask:
    """The mask on another device."""
    names = ("dense", "bounds", "query_bounds")
    given = {name: getattr(mask, name) for name in names}
    return replace(mask, **{name: x.to(device) for name, x in given.items() if x is not None})


def inputs(
    s: int,
    t: int | None = None,
    *,
    groups: int = N,
    d: int = D,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> list[Tensor]:
    """q, k, v and sinks, laid out as (s, b, n, d) as projections give them."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(s, B, N, d), (t or s, B, groups, d), (t or s, B, groups, d)]
    drawn = [torch.randn(x, generator=generator).permute(1, 2, 0, 3) for x in shapes]
    drawn.append(torch.randn(N, generator=generator))
    return [x.to(device, dtype).requires_grad_() for x in drawn]


def attend(
    backend: AttentionBackend, given: list[Tensor], mask: AttentionMask, with_sink: bool
) -> tuple[Tensor, list[Tensor]]:
    """Output, and the gradients of q, k, v and, where there is one, the sink."""
    used = given if with_sink else given[:3]
    out = backend.attend(
        *given[:3],
        mask,
        Softmax(1.0 / math.sqrt(given[0].shape[3]), sink=given[3] if with_sink else None),
    )
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(out, used, weights.to(out.device, out.dtype))
    return out, list(grads)


def expected(
    given: list[Tensor], mask: AttentionMask, with_sink: bool
) -> tuple[Tensor, list[Tensor]]:
    """The same in fp64."""
    wide = [x.detach().double().requires_grad_() for x in given]
    return attend(LOCAL, wide, mask, with_sink)


def attend_biased(
    backend: AttentionBackend, given: list[Tensor], mask: AttentionMask, bias: Tensor
) -> list[Tensor]:
    """Output, and the gradients of q, k, v and the bias, (1, n, s, t)."""
    out = backend.attend(*given[:3], mask, Softmax(1.0, bias=bias))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(out, [*given[:3], bias], weights.to(out.device, out.dtype))
    return [out, *grads]


def expected_biased(given: list[Tensor], mask: AttentionMask, bias: Tensor) -> list[Tensor]:
    """The same in fp64."""
    wide = [x.detach().double().requires_grad_() for x in (*given[:3], bias)]
    return attend_biased(LOCAL, wide[:3], mask, wide[3])


def some_bias(s: int, t: int) -> Tensor:
    """Numbers to add to scores."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(1, N, s, t, generator=generator).requires_grad_()
