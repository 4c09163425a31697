"""The result of a pretraining."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from torch import nn

from trainyard.training.loop.loop import Outcome
from trainyard.training.loop.state import TrainState

ReadLedger: TypeAlias = Callable[[], Iterator[dict[str, Any]]]
"""Reads every step of a finished run."""


def _no_ledger() -> Iterator[dict[str, Any]]:
    return iter(())


@dataclass(frozen=True)
class Result:
    """The outcome of a pretraining."""

    outcome: Outcome
    """`finished`; `stopped` by a signal or --exit-duration-in-mins, or `paused` by --exit-interval.
    A stopped or paused run is saved."""
    state: TrainState
    metrics: dict[str, Any]
    """Losses of the whole run and speed of this attempt; empty unless the run is finished."""
    chunks: list[nn.Module]
    """The trained parts of the model on this rank."""
    stopped_by: str = ""
    """The reason for a stop; empty for a finished run."""
    read_ledger: ReadLedger = _no_ledger

    @cached_property
    def ledger(self) -> list[dict[str, Any]]:
        """Every step of a finished run, on rank 0; read from the run folder when it is asked
        for."""
        return list(self.read_ledger())
