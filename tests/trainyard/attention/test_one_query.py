"""One query against cached keys: torch's attention with repeated heads and a mask."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from trainyard.attention.one_query import one_query_attention


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
