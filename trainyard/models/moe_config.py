"""Options of a mixture of experts, for the formulas that count one before there is one."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.errors import ConfigError
from trainyard.models.config_sizes import MAX_SIZE, check_at_most


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """How many experts every layer has, how many a token visits, how wide they are."""

    num_experts: int | None = None
    """Experts in each layer's MLP; unset: a dense model."""
    moe_router_topk: int = 2
    """Experts that a token visits."""
    moe_ffn_hidden_size: int | None = None
    """Width inside an expert; unset: the model's --ffn-hidden-size."""

    def __post_init__(self) -> None:
        """Refuse counts that cannot be."""
        if self.num_experts is None:
            return
        if self.num_experts <= 0:
            raise ConfigError(f"--num-experts must be above 0, got {self.num_experts}")
        check_at_most(self, MAX_SIZE, "num_experts", "moe_ffn_hidden_size")
        if not 0 < self.moe_router_topk <= self.num_experts:
            raise ConfigError(
                f"--moe-router-topk ({self.moe_router_topk}) must be from 1 to --num-experts "
                f"({self.num_experts})"
            )
        if self.moe_ffn_hidden_size is not None and self.moe_ffn_hidden_size <= 0:
            raise ConfigError(
                f"--moe-ffn-hidden-size must be above 0, got {self.moe_ffn_hidden_size}"
            )

    @property
    def enabled(self) -> bool:
        """Whether there are experts at all."""
        return self.num_experts is not None


DENSE = MoEConfig()
