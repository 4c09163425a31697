"""What a step computes, as numbers that one rank can tell the others.

R sequences, M blocks of the longest one, T tokens, L rows of logits, P tokens that are scored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainyard.attention.paged import PagedLayout
from trainyard.attention.slot_states import Ragged, StateGroup
from trainyard.inference.dynamic.scheduler import Work

Ints = NDArray[np.int64]
_HEADER = 6


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tokens of a step, sequence by sequence, and which of them answer what."""

    counts: Ints
    """(R) new tokens of each sequence."""
    firsts: Ints
    """(R) position of the first of them."""
    tables: Ints
    """(R, M) blocks of each sequence; behind its last one 0."""
    tokens: Ints
    """(T)."""
    logit_rows: Ints
    """(L) of T, after which the next token is wanted."""
    score_rows: Ints
    """(P) of T, after which a known token is scored."""
    score_targets: Ints
    """(P) those tokens."""
    slots: Ints
    """(R) slot of the states of each sequence."""
    top_n: int = 0
    """Likeliest tokens beside each scored one."""

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token, whose logits are wanted, and no more."""
        return len(self.counts) == len(self.tokens) == len(self.logit_rows) and not len(
            self.score_rows
        )

    @property
    def lengths(self) -> Ints:
        """(R) tokens of each sequence after the step."""
        return self.firsts + self.counts

    def places(self, block_size: int) -> tuple[Ints, Ints, Ints]:
        """(T) positions of the tokens, the blocks of their keys, and the places there."""
        begins = np.cumsum(self.counts) - self.counts
        rows = np.repeat(np.arange(len(self.counts)), self.counts)
        positions = np.arange(len(self.tokens)) + np.repeat(self.firsts - begins, self.counts)
        return positions, self.tables[rows, positions // block_size], positions % block_size

    def begun_blocks(self, block_size: int) -> Ints:
        """The blocks that get their first token."""
        _, blocks, places = self.places(block_size)
        begun: Ints = blocks[places == 0]
        return begun

    def encoded(self) -> Ints:
        """All of it in one row."""
        sizes = [*self.tables.shape, len(self.tokens), len(self.logit_rows), len(self.score_rows)]
        parts = [self.counts, self.firsts, self.tables.reshape(-1), self.tokens]
        parts += [self.logit_rows, self.score_rows, self.score_targets, self.slots]
        return np.concatenate([np.array([*sizes, self.top_n], np.int64), *parts])

    @staticmethod
    def decoded(row: Ints) -> StepBatch:
        """What `encoded` gave."""
        r, m, t, rows, scores, top_n = (int(size) for size in row[:_HEADER])
        ends = np.cumsum([_HEADER, r, r, r * m, t, rows, scores, scores])
        counts, firsts, tables, tokens, logits, places, targets, slots = np.split(row, ends)[1:]
        return StepBatch(
            counts, firsts, tables.reshape(r, m), tokens, logits, places, targets, slots, top_n
        )


def batch_of(works: Sequence[Work], scored: Sequence[Sequence[int]], top_n: int) -> StepBatch:
    """The step of these works.

    scored: of each, the positions after which a token of its prompt is scored."""
    widest = max(len(work.sequence.blocks) for work in works)
    tables = np.zeros((len(works), widest), np.int64)
    tokens: list[int] = []
    logit_rows: list[int] = []
    score_rows: list[int] = []
    targets: list[int] = []
    for row, (work, places) in enumerate(zip(works, scored, strict=True)):
        known, first = work.sequence.tokens, len(tokens)
        tables[row, : len(work.sequence.blocks)] = work.sequence.blocks
        tokens += known[work.start : work.start + work.num_known]
        tokens += work.guesses
        if work.is_last:
            logit_rows += range(first + work.num_known - 1, len(tokens))
        score_rows += (first + place - work.start for place in places)
        targets += (known[place + 1] for place in places)
    return StepBatch(
        counts=_row(work.end - work.start for work in works),
        firsts=_row(work.start for work in works),
        tables=tables,
        tokens=_row(tokens),
        logit_rows=_row(logit_rows),
        score_rows=_row(score_rows),
        score_targets=_row(targets),
        slots=_row(work.sequence.slot for work in works),
        top_n=top_n,
    )


def _row(numbers: Iterable[int]) -> Ints:
    return np.array(list(numbers), np.int64)


def on_device(rows: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """Rows of numbers on a device, by one copy."""
    whole = torch.from_numpy(np.concatenate(rows))
    if device.type == "cuda":
        whole = whole.pin_memory().to(device, non_blocking=True)
    return list(whole.split([len(row) for row in rows]))


def state_groups(batch: StepBatch, device: torch.device) -> list[StateGroup]:
    """The sequences of a step by how many new tokens they have, to the next power of 2: less than
    half of a group is padding, and there are few groups."""
    if batch.counts.max() == 1:
        return [StateGroup(on_device([batch.slots], device)[0])]
    starts = np.cumsum(batch.counts) - batch.counts
    sizes = np.ceil(np.log2(batch.counts)).astype(np.int64)
    groups = []
    for size in np.unique(sizes):
        own = np.flatnonzero(sizes == size)
        counts = batch.counts[own]
        new = np.arange(counts.max())
        places = starts[own, None] + np.minimum(new, counts[:, None] - 1)
        rows = np.flatnonzero(new < counts[:, None])
        parts = [batch.slots[own], counts, places.reshape(-1), rows, places.reshape(-1)[rows]]
        slots, counted, flat, kept, written = on_device(parts, device)
        groups.append(StateGroup(slots, Ragged(counted, flat.view(places.shape), kept, written)))
    return groups


def layout_of(
    batch: StepBatch, block_size: int, device: torch.device
) -> tuple[Tensor, PagedLayout]:
    """The tokens (1, T) of a step and where they belong, on a device."""
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(batch.counts)))
    rows = (batch.tokens, *batch.places(block_size), batch.tables.reshape(-1), starts)
    tokens, positions, blocks, places, tables, begins, lengths = on_device(
        (*rows, batch.lengths), device
    )
    layout = PagedLayout(
        positions=positions.unsqueeze(0),
        blocks=blocks,
        places=places,
        tables=tables.view(batch.tables.shape),
        starts=begins,
        lengths=lengths,
        most_new=int(batch.counts.max()),
        most_keys=int(batch.lengths.max()),
    )
    return tokens.unsqueeze(0), layout
