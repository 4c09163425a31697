"""What the routers of a step come to: losses, loads and drops. No torch.

The sums of a layer are the choices that fell on each expert, the figures below, and with a capacity
the choices beyond that of each expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trainyard.models.layer_sums import LayerReport, LayerSums
from trainyard.models.moe_config import MoEConfig

if TYPE_CHECKING:
    from trainyard.models.config import TransformerConfig

NUM_FIGURES = 2
BALANCE_LOSS, Z_LOSS = range(NUM_FIGURES)
"""The losses, without their factors."""

LOSS_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""In the log, as in Megatron-LM."""


def num_sums(moe: MoEConfig) -> int:
    """Numbers that the router of a layer adds up."""
    assert moe.num_experts is not None
    vectors = 1 if moe.moe_expert_capacity_factor is None else 2
    return vectors * moe.num_experts + NUM_FIGURES


def layer_sums(config: TransformerConfig) -> LayerSums | None:
    """What the routers of a model add up; None without experts."""
    moe = config.experts
    if moe.num_experts is None:
        return None
    layers = tuple(filter(config.has_experts, config.trained_layers))

    def report(sums: Mapping[int, Sequence[float]], num_microbatches: int) -> LayerReport:
        loads, drops = expert_loads(moe, sums), expert_drops(moe, sums)
        found = figures(moe, loads, drops)
        return LayerReport(losses(moe, sums, num_microbatches), found, loads, drops)

    return LayerSums(layers, num_sums(moe), report)


def losses(
    moe: MoEConfig, sums: Mapping[int, Sequence[float]], num_microbatches: int
) -> dict[str, float]:
    """Losses by name, means over layers and micro-batches, without their factors. sums: by
    layer."""
    found: dict[str, float] = {}
    kind = moe.moe_router_load_balancing_type
    if moe.moe_aux_loss_coeff and kind in LOSS_NAMES:
        found[LOSS_NAMES[kind]] = _mean(moe, sums, BALANCE_LOSS) / num_microbatches
    if moe.moe_z_loss_coeff:
        found["z_loss"] = _mean(moe, sums, Z_LOSS) / num_microbatches
    return found


def figures(
    moe: MoEConfig, loads: Mapping[int, Sequence[float]], drops: Mapping[int, Sequence[float]]
) -> dict[str, float]:
    """`max expert load` and `min expert load`, as multiples of an even share, of the layer where
    they are furthest from it, and where the first is: `busiest layer` and `busiest expert`. With a
    capacity, the shares of choices beyond it: of all, and of the busiest expert's."""
    assert moe.num_experts is not None
    places = [(layer, expert) for layer in loads for expert in range(moe.num_experts)]
    layer, expert = max(places, key=lambda place: loads[place[0]][place[1]])
    found = {
        "max expert load": loads[layer][expert] * moe.num_experts,
        "min expert load": min(map(min, loads.values())) * moe.num_experts,
        "busiest layer": layer,
        "busiest expert": expert,
    }
    if drops:
        # Every layer has as many choices, so the mean over layers is the share of all.
        dropped = sum(loads[n][e] * drops[n][e] for n, e in places)
        found["dropped tokens"] = dropped / len(loads)
        found["busiest expert drops"] = drops[layer][expert]
    return found


def expert_loads(
    moe: MoEConfig, sums: Mapping[int, Sequence[float]]
) -> dict[int, tuple[float, ...]]:
    """For each layer the share of choices that fell on each expert."""
    found = {}
    for layer, values in sums.items():
        counts = values[: moe.num_experts]
        total = max(sum(counts), 1.0)
        found[layer] = tuple(count / total for count in counts)
    return found


def expert_drops(
    moe: MoEConfig, sums: Mapping[int, Sequence[float]]
) -> dict[int, tuple[float, ...]]:
    """For each layer the share of each expert's choices that were beyond its capacity; empty if
    nothing is dropped."""
    if moe.moe_expert_capacity_factor is None:
        return {}
    assert moe.num_experts is not None
    first = moe.num_experts + NUM_FIGURES
    return {
        layer: tuple(
            dropped / max(count, 1.0)
            for count, dropped in zip(values[: moe.num_experts], values[first:], strict=True)
        )
        for layer, values in sums.items()
    }


def _mean(moe: MoEConfig, sums: Mapping[int, Sequence[float]], figure: int) -> float:
    assert moe.num_experts is not None
    return sum(values[moe.num_experts + figure] for values in sums.values()) / len(sums)
