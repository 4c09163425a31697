"""Attention over blocks = attention over the keys of each sequence in a row."""

from __future__ import annotations

import pytest
import torch

from tests.trainyard.attention.paged_cases import CASES, Inputs, inputs_of
from trainyard.attention.base import Numerics
from trainyard.attention.local import LocalBackend
from trainyard.attention.masks import AttentionMask
from trainyard.attention.paged import paged_attention
from trainyard.testing.tolerances import FP32_SUM_ORDER


def one_by_one(inputs: Inputs) -> torch.Tensor:
    """Plain attention of each sequence."""
    q, keys, values, layout, softmax, window = inputs
    outs = []
    for row, length in enumerate(layout.lengths.tolist()):
        begin, end = layout.starts[row : row + 2].tolist()
        blocks = layout.tables[row, : -(-length // keys.shape[1])]
        k, v = (x[blocks].flatten(0, 1)[:length].transpose(0, 1)[None] for x in (keys, values))
        queries = q[begin:end].transpose(0, 1)[None]
        mask = AttentionMask(window=window)
        outs.append(
            LocalBackend(Numerics()).attend(queries, k, v, mask, softmax)[0].transpose(0, 1)
        )
    return torch.cat(outs)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_blocks_are_the_rows_of_keys_that_their_tables_say(case: object) -> None:
    inputs = inputs_of(case)  # type: ignore[arg-type]
    torch.testing.assert_close(paged_attention(*inputs), one_by_one(inputs), **FP32_SUM_ORDER)
