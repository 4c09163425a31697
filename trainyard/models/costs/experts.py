"""Options of a mixture of experts, for the formulas of `stages.plan`. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.config import MAX_SIZE, check_above_zero, check_at_most
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Experts of every layer, for the formulas of `stages.plan`; no model has experts yet."""

    num_experts: int | None = None
    """Experts in each layer's MLP; unset: a dense model."""
    moe_router_topk: int = 2
    """Experts that a token visits."""
    moe_ffn_hidden_size: int | None = None
    """Width inside an expert; unset: the model's --ffn-hidden-size."""

    def __post_init__(self) -> None:
        """Raise ConfigError for impossible counts."""
        if self.num_experts is None:
            return
        check_above_zero(self, "num_experts", "moe_ffn_hidden_size")
        check_at_most(self, MAX_SIZE, "num_experts", "moe_ffn_hidden_size")
        if not 0 < self.moe_router_topk <= self.num_experts:
            raise ConfigError(
                f"--moe-router-topk ({self.moe_router_topk}) must be from 1 to --num-experts "
                f"({self.num_experts})"
            )

    @property
    def enabled(self) -> bool:
        """Whether the model has experts."""
        return self.num_experts is not None


DENSE = MoEConfig()
