"""Degrees of parallelism and the means of communication, under Megatron-LM's names. Standard
library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.config import execution
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How many processes work on one model, and how they talk."""

    nproc_per_node: int = execution(1)
    """Ranks to start on this machine; leave it out under torchrun."""
    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's matrices; 1 is all there is yet."""
    pipeline_model_parallel_size: int = 1
    """Ranks that share the layers; 1 is all there is yet."""
    context_parallel_size: int = 1
    """Ranks that share each sequence; 1 is all there is yet."""
    distributed_backend: Literal["nccl", "gloo"] | None = execution(None)
    """Communication between ranks; unset: nccl on CUDA devices, gloo on CPUs."""
    distributed_timeout_minutes: float = execution(10.0)
    """How long a rank waits for the others before it takes one of them for dead."""

    def __post_init__(self) -> None:
        """Refuse degrees that this version cannot serve, in words."""
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
        ):
            if getattr(self, name) != 1:
                raise ConfigError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: only data parallelism is "
                    "there, this one not yet; leave it at 1"
                )
        if self.nproc_per_node < 1:
            raise ConfigError(f"--nproc-per-node must be at least 1, got {self.nproc_per_node}")
        if self.distributed_timeout_minutes <= 0:
            raise ConfigError(
                "--distributed-timeout-minutes must be above 0, got "
                f"{self.distributed_timeout_minutes}"
            )
