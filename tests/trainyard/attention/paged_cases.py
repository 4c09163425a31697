"""Sequences in blocks, in every combination of what a layer can ask for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainyard.attention.base import Softmax
from trainyard.attention.paged import PagedLayout


class Case(NamedTuple):
    """counts, lengths: new tokens and keys of each sequence. heads, groups, width, value_width and
    window: of a layer."""

    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    heads: int = 8
    groups: int = 2
    width: int = 64
    value_width: int = 64
    block_size: int = 16
    window: int | None = None
    sink: bool = False


CASES = {
    "decode": Case((1, 1, 1), (1, 37, 64)),
    "parts": Case((1, 1), (700, 3), groups=8),
    "parts with a sink": Case((1,), (600,), sink=True),
    "prefill": Case((40, 33), (40, 33)),
    "chunk": Case((70,), (150,), block_size=64),
    "mixed": Case((1, 19, 1, 5), (80, 60, 2, 5)),
    "window": Case((1, 30, 1), (90, 77, 3), window=9),
    "window and sink": Case((1, 30, 1), (90, 77, 3), window=9, sink=True),
    "odd heads": Case((1, 9), (20, 9), heads=6, groups=2, width=40, value_width=24),
    "one group of many": Case((1, 3), (20, 9), heads=20, groups=1),
    "odd blocks": Case((1, 9), (20, 30), block_size=12),
}


class Inputs(NamedTuple):
    """Arguments of `paged_attention`."""

    q: Tensor
    keys: Tensor
    values: Tensor
    layout: PagedLayout
    softmax: Softmax
    window: tuple[int, int] | None


def inputs_of(case: Case, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    size, counts, lengths = case.block_size, case.counts, case.lengths
    needed = [-(-length // size) for length in lengths]
    order = torch.randperm(sum(needed) + 2, generator=generator)
    tables = torch.zeros(len(counts), max(needed) + 1, dtype=torch.int64)
    for row, blocks in enumerate(order[: sum(needed)].split(needed)):
        tables[row, : len(blocks)] = blocks
    positions = [
        torch.arange(length - count, length) for count, length in zip(counts, lengths, strict=True)
    ]
    starts = torch.tensor([0, *counts]).cumsum(0)
    layout = PagedLayout(
        positions=torch.cat(positions).unsqueeze(0).to(device),
        blocks=torch.zeros(sum(counts), dtype=torch.int64, device=device),
        places=torch.zeros(sum(counts), dtype=torch.int64, device=device),
        tables=tables.to(device),
        starts=starts.to(device),
        lengths=torch.tensor(lengths, device=device),
        most_new=max(counts),
        most_keys=max(lengths),
    )
    blocks = (len(order), size, case.groups)
    sink = draw(case.heads) if case.sink else None
    return Inputs(
        draw(sum(counts), case.heads, case.width),
        draw(*blocks, case.width),
        draw(*blocks, case.value_width),
        layout,
        Softmax(case.width**-0.5, sink=sink),
        None if case.window is None else (case.window, 0),
    )
