"""What the routers of a step come to: losses, loads and drops. No torch.

The sums of a layer are the choices that fell on each expert, then the figures below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trainyard.models.layer_sums import LayerReport, LayerSums
from trainyard.models.moe_config import MoEConfig

if TYPE_CHECKING:
    from trainyard.models.config import TransformerConfig

NUM_FIGURES = 3
DROPPED, BALANCE_LOSS, Z_LOSS = range(NUM_FIGURES)
"""Choices beyond capacity; the losses, without their factors."""

LOSS_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""In the log, as in Megatron-LM."""


def layer_sums(config: TransformerConfig) -> LayerSums | None:
    """What the routers of a model add up; None without experts."""
    moe = config.experts
    if moe.num_experts is None:
        return None
    layers = tuple(filter(config.has_experts, config.trained_layers))

    def report(sums: Mapping[int, Sequence[float]], num_microbatches: int) -> LayerReport:
        loads = expert_loads(moe, sums)
        return LayerReport(losses(moe, sums, num_microbatches), figures(moe, sums, loads), loads)

    return LayerSums(layers, moe.num_experts + NUM_FIGURES, report)


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
    moe: MoEConfig, sums: Mapping[int, Sequence[float]], loads: Mapping[int, Sequence[float]]
) -> dict[str, float]:
    """`max expert load` and `min expert load`, as multiples of an even share, of the layer where
    they are furthest from it; `dropped tokens`, the share of choices beyond capacity."""
    assert moe.num_experts is not None
    shares = [share for of_layer in loads.values() for share in of_layer]
    found = {
        "max expert load": max(shares) * moe.num_experts,
        "min expert load": min(shares) * moe.num_experts,
    }
    if moe.moe_expert_capacity_factor is not None:
        choices = sum(sum(values[: moe.num_experts]) for values in sums.values())
        dropped = sum(values[moe.num_experts + DROPPED] for values in sums.values())
        found["dropped tokens"] = dropped / max(choices, 1.0)
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


def _mean(moe: MoEConfig, sums: Mapping[int, Sequence[float]], figure: int) -> float:
    assert moe.num_experts is not None
    return sum(values[moe.num_experts + figure] for values in sums.values()) / len(sums)
