"""One rank tells the others of a model what to compute, step by step.

The first rank decides; the others wait for its word, compute with it, and end when it says so. A
rank that is gone breaks the connection, which is an error on all others within the time that they
wait for each other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainyard.inference.dynamic.batch import Ints, StepBatch
from trainyard.inference.dynamic.runner import PagedRunner
from trainyard.parallel.comm_errors import communicating, communication_errors
from trainyard.parallel.groups import ProcessGroups

BEAT_SECONDS = 1.0
"""An idle first rank says so often that it lives; ranks wait for --distributed-timeout-minutes."""


class Word(IntEnum):
    """What the first rank says."""

    IDLE = 0
    STEP = 1
    END = 2


class Link:
    """Between the ranks of a model; alone it does nothing."""

    def __init__(self, groups: ProcessGroups, device: torch.device) -> None:
        self._groups, self._device = groups, device
        self._group = groups.model
        self._said = time.monotonic()

    @property
    def is_first(self) -> bool:
        """Whether this rank decides."""
        return self._group is None or dist.get_rank(self._group) == 0

    def say(self, word: Word, batch: StepBatch | None = None) -> None:
        """Tell all other ranks, a step with its numbers."""
        if self._group is None:
            return
        self._said = time.monotonic()
        row = np.zeros(0, np.int64) if batch is None else batch.encoded()
        self._broadcast(torch.tensor([word, len(row)]))
        if batch is not None:
            self._broadcast(torch.from_numpy(row))

    def say_idle(self) -> None:
        """Tell them from time to time that there is nothing to do."""
        if time.monotonic() - self._said > BEAT_SECONDS:
            self.say(Word.IDLE)

    def hear(self) -> tuple[Word, Ints]:
        """What the first rank said."""
        word, length = self._broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
        row = self._broadcast(torch.zeros(length, dtype=torch.int64)) if length else torch.empty(0)
        return Word(word), row.cpu().numpy()

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Failures of a connection inside are CommunicationError."""
        size = 1 if self._group is None else dist.get_world_size(self._group)
        with communication_errors(self._groups.rank, size):
            yield

    def _broadcast(self, row: Tensor) -> Tensor:
        row = row.to(self._device)
        with communicating("generation: telling the other ranks what to compute"):
            dist.broadcast(row, group=self._group, group_src=0)
        return row


class Follower:
    """Any rank but the first."""

    def __init__(self, runner: PagedRunner, link: Link) -> None:
        self._runner, self._link = runner, link

    def run(self) -> None:
        """Compute what the first rank says, until it ends. CommunicationError if it is gone."""
        with self._link.errors():
            while True:
                word, row = self._link.hear()
                if word is Word.END:
                    return
                if word is Word.STEP:
                    self._runner.run(StepBatch.decoded(row))
