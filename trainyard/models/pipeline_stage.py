"""Which part of a model a pipeline stage holds. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelStage:
    """A run of layers, and whether the ends of the model belong to them."""

    layers: range | None
    """Global numbers; None: all layers."""
    has_embedding: bool = True
    has_output: bool = True
    """Final norm, output layer and loss."""

    def layer_numbers(self, num_layers: int) -> range:
        """The layers of a model of `num_layers` that are here."""
        held = range(num_layers) if self.layers is None else self.layers
        assert not held or 0 <= held[0] <= held[-1] < num_layers, (held, num_layers)
        return held


WHOLE = ModelStage(None)
