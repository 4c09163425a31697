"""Which parameters share their rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from trainyard.optim.config import OptimizerConfig
from trainyard.optim.schedule import Rates
from trainyard.parallel.sharding import is_expert

DECOUPLED = ("word_embeddings.weight", "output_layer.weight")
"""Ends of the names of the parameters that --decoupled-lr is for."""

Condition = Callable[[str, Tensor], bool]
"""Of a parameter's global name and itself."""


@dataclass(frozen=True, slots=True)
class Multipliers:
    """How a parameter is updated, and how its rates follow from those of the step."""

    weight_decay: float = 1.0
    learning_rate: float = 1.0
    is_decoupled: bool = False
    """Its learning rate is --decoupled-lr's."""
    is_orthogonalized: bool = False
    """Muon updates it, not the rule of all other parameters."""

    def rates_of(self, rates: Rates) -> tuple[float, float]:
        """(learning rate, weight decay) of a parameter at this step."""
        rate = rates.decoupled_learning_rate if self.is_decoupled else rates.learning_rate
        return rate * self.learning_rate, rates.weight_decay * self.weight_decay


def is_vector(name: str, parameter: Tensor) -> bool:
    """Biases and other vectors (norms), which have no weight decay. Asked of a part of a matrix it
    says the same: parts keep the number of dims."""
    return parameter.ndim == 1 or name.endswith(".bias")


def is_embedding_or_output(name: str) -> bool:
    """Whether --decoupled-lr is for this parameter."""
    return name.endswith(DECOUPLED)


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon is for this parameter: a matrix of a layer, or the stacked ones of experts. The
    rest (embeddings, heads, output layer, norms, biases) has no spectrum to level."""
    num_dims = 3 if is_expert(parameter) else 2
    return "layers." in name and parameter.ndim == num_dims and not is_vector(name, parameter)


def multipliers_of(
    name: str,
    parameter: Tensor,
    config: OptimizerConfig,
    *,
    no_weight_decay: Condition = is_vector,
    scale_lr: Condition | None = None,
    lr_mult: float = 1.0,
) -> Multipliers:
    """The multipliers of one parameter.

    scale_lr: whose learning rate is multiplied by `lr_mult` (a new head in fine-tuning)."""
    is_scaled = scale_lr is not None and scale_lr(name, parameter)
    return Multipliers(
        weight_decay=0.0 if no_weight_decay(name, parameter) else 1.0,
        learning_rate=lr_mult if is_scaled else 1.0,
        is_decoupled=config.decoupled_lr is not None and is_embedding_or_output(name),
        is_orthogonalized=config.optimizer == "muon" and is_hidden_matrix(name, parameter),
    )


def grouped(multipliers: Sequence[Multipliers]) -> dict[Multipliers, list[int]]:
    """Indices of parameters with the same multipliers; the most weight decay comes first."""
    groups: dict[Multipliers, list[int]] = {}
    for place, found in enumerate(multipliers):
        groups.setdefault(found, []).append(place)
    return dict(sorted(groups.items(), key=lambda item: -item[0].weight_decay))
