"""What layers add up over a step, as one vector over all ranks, and its meaning. Standard library
only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LayerReport:
    """Figures of a step from inside of layers, equal on all ranks."""

    losses: Mapping[str, float] = field(default_factory=dict)
    """By name, means over layers and micro-batches, without their factors."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Other numbers of the step, by name."""
    loads: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """The share of the tokens that each part of a layer got, by layer."""
    drops: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """The share of its tokens that each part of a layer dropped, by layer; empty if none can."""


@dataclass(frozen=True, slots=True)
class LayerSums:
    """The sums of all `StepModule`s of a model."""

    layers: tuple[int, ...]
    """Layers with such a module."""
    width: int
    """Numbers of each."""
    report: Callable[[Mapping[int, Sequence[float]], int], LayerReport]
    """(sums by layer, micro-batches of all replicas) -> figures of the step."""

    def by_layer(self, values: Sequence[float]) -> dict[int, Sequence[float]]:
        """The sums of each layer. values: all, layer by layer."""
        width = self.width
        return {n: values[i * width : (i + 1) * width] for i, n in enumerate(self.layers)}
