"""The steps of a training as curves: 16 bytes for each figure of a step."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from trainyard.charts.numbers import is_number
from trainyard.charts.points import BLOCK, Points


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One line of the ledger, and its timing where the run recorded one."""

    step: int
    tokens: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    max_expert_load: float | None = None
    """Of the busiest expert of all layers, as a multiple of an even share."""
    min_expert_load: float | None = None
    dropped_tokens: float | None = None
    """Share of the choices of experts that were beyond capacity."""
    more_losses: Mapping[str, float] = field(default_factory=dict)
    """Losses beside that of the tokens, by name."""


FIGURES = tuple(one.name for one in fields(Step) if one.name not in ("step", "more_losses"))


class Steps:
    """All steps of a run, in their order."""

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        self._figures = {name: Points() for name in FIGURES}
        self.more_losses: dict[str, Points] = {}
        """Losses beside that of the tokens, by name."""
        self.last_step: int | None = None
        for step in steps:
            self.add(step)

    def add(self, step: Step) -> None:
        """Add the next step."""
        self.last_step = step.step
        for name, points in self._figures.items():
            points.add(step.step, getattr(step, name))
        for name, loss in step.more_losses.items():
            self.more_losses.setdefault(name, Points()).add(step.step, loss)

    def __bool__(self) -> bool:
        return self.last_step is not None

    def points(self, name: str) -> Points:
        """A figure of `Step` by step, without the steps that do not have it."""
        return self._figures[name]

    def last(self, name: str) -> float | None:
        """The last value of a figure; None if no step has it."""
        points = self._figures[name]
        return points[-1][1] if points else None


class Speeds:
    """Tokens per second by step, from lines of timings.jsonl in any order; the later of two lines
    counts."""

    def __init__(self, timings: Iterable[Mapping[str, Any]]) -> None:
        self._blocks: dict[int, array[float]] = {}
        """By step // BLOCK; not a number where there is no speed."""
        for line in timings:
            if is_number(speed := line.get("tokens_per_second")):
                block, within = divmod(line["step"], BLOCK)
                if block not in self._blocks:
                    self._blocks[block] = array("d", [math.nan]) * BLOCK
                self._blocks[block][within] = speed

    def of(self, step: int) -> float | None:
        """Of a step."""
        block, within = divmod(step, BLOCK)
        speed = self._blocks[block][within] if block in self._blocks else math.nan
        return None if math.isnan(speed) else speed
