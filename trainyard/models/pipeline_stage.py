"""The part of a model that a pipeline stage holds. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Consecutive layers, and whether the ends of the model belong to the stage."""

    layers: range | None
    """Global numbers; None: all layers."""
    has_embedding: bool = True
    has_output: bool = True
    """Final norm, output layer and loss."""

    def layer_numbers(self, num_layers: int) -> range:
        """The layers of a model of `num_layers` that this stage holds."""
        numbers = range(num_layers) if self.layers is None else self.layers
        assert not numbers or 0 <= numbers[0] <= numbers[-1] < num_layers, (numbers, num_layers)
        return numbers


WHOLE = PipelineStage(None)
