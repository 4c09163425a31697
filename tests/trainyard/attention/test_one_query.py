"""One query against cached keys: torch's attention with repeated heads and a mask."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from trainyard.attention.base import Softmax
from trainyard.attention.one_query import one_query_attention
from trainyard.attention.paged import row_attention


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("masked", [False, True])
def test_it_equals_attention_with_repeated_heads(groups: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(3, 6, 1, 8, generator=generator)
    k, v = torch.randn(2, 3, groups, 11, 8, generator=generator)
    lengths = torch.tensor([4, 11, 1])
    allowed = (torch.arange(11) < lengths[:, None])[:, None, None] if masked else None
    wide = [x.repeat_interleave(6 // groups, dim=1) for x in (k, v)]
    expected = functional.scaled_dot_product_attention(q, *wide, allowed, scale=0.3)
    found = one_query_attention(q, k, v, allowed, 0.3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 3])
def test_keys_of_rows_are_blocks_of_their_own(window: int | None) -> None:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(3, 6, 1, 8, generator=generator)
    k, v = torch.randn(2, 3, 2, 11, 8, generator=generator)
    lengths, keys = torch.tensor([4, 11, 1]), torch.arange(11)
    allowed = keys < lengths[:, None]
    if window is not None:
        allowed &= keys >= lengths[:, None] - 1 - window
    expected = one_query_attention(q, k, v, allowed[:, None, None], 0.3)
    bounds = None if window is None else (window, 0)
    found = row_attention(q, k, v, lengths, Softmax(0.3), bounds)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
