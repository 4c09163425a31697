"""Activations computed again or kept elsewhere, under Megatron-LM's names. None of it changes a
result. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.config import execution
from trainyard.errors import ConfigError
from trainyard.models.config_sizes import ModelSizes

RecomputeGranularity = Literal["none", "selective", "full"]
RecomputeModule = Literal["core_attn", "mlp", "layernorm"]


@dataclass(frozen=True, kw_only=True)
class RecomputeOptions(ModelSizes):
    """What is not kept from the forward pass to the backward pass."""

    recompute_granularity: Literal["none", "selective", "full"] = execution("none")
    """Activations to compute again in the backward pass: those of some modules (selective) or of
    whole layers (full)."""
    recompute_activations: bool = execution(False)
    """The same as --recompute-granularity selective."""
    recompute_modules: tuple[RecomputeModule, ...] = execution(("core_attn",))
    """Modules that selective recomputation computes again."""
    recompute_method: Literal["uniform", "block"] | None = execution(None)
    """Full recomputation of all layers in groups (uniform), or of the first ones of each stage
    (block); unset: uniform."""
    recompute_num_layers: int | None = execution(None)
    """uniform: layers of a group, of which only the input is kept; block: layers of each stage
    that are recomputed. Unset: 1."""
    cpu_offloading_num_layers: int = execution(0)
    """The first so many layers of each stage keep their activations in the memory of the host."""

    def _check_recompute(self) -> None:
        if self.recompute_activations and self.recompute_granularity == "full":
            raise ConfigError(
                "--recompute-activations means --recompute-granularity selective, which is full; "
                "give one of them"
            )
        if not self.recompute_modules:
            raise ConfigError("--recompute-modules names no module; leave it out for core_attn")
        count = self.recompute_num_layers
        if count is not None and not 0 < count <= self.num_layers:
            raise ConfigError(
                f"--recompute-num-layers ({count}) must be from 1 to --num-layers "
                f"({self.num_layers})"
            )
        if self.recompute != "full" and (count is not None or self.recompute_method is not None):
            raise ConfigError(
                "--recompute-method and --recompute-num-layers need --recompute-granularity full"
            )
        self._check_offloading()

    def _check_offloading(self) -> None:
        count = self.cpu_offloading_num_layers
        if not 0 <= count <= self.num_layers:
            raise ConfigError(
                f"--cpu-offloading-num-layers ({count}) must be from 0 to --num-layers "
                f"({self.num_layers})"
            )
        if count and self.recompute != "none":
            raise ConfigError(
                f"--cpu-offloading-num-layers moves what --recompute-granularity {self.recompute} "
                "does not keep; give one of them"
            )

    @property
    def recompute(self) -> RecomputeGranularity:
        """What is computed again."""
        return "selective" if self.recompute_activations else self.recompute_granularity

    def recomputes(self, module: RecomputeModule) -> bool:
        """Whether a layer computes this module of its own again."""
        return self.recompute == "selective" and module in self.recompute_modules
