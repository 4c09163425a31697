"""What a rank needs in theory, before it is built, and what was used in the end.

The theory is that of the model's family, on the most loaded rank of the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainyard.models.config import TransformerConfig
from trainyard.models.families import family_of
from trainyard.models.layout import GRADIENT_BYTES, PARAMETER_BYTES, Layout
from trainyard.optim.precision import PrecisionConfig
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.dims import ParallelDims
from trainyard.parallel.pipeline.partition import partition

GIGABYTE = 1e9


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of the most loaded rank in theory."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """In all."""
        return self.parameters + self.gradients + self.optimizer + self.activations

    def lines(self) -> list[str]:
        """The report."""
        rows = (
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("optimizer state", self.optimizer),
            ("activations", self.activations),
        )
        parts = " | ".join(f"{name}: {gigabytes(value)}" for name, value in rows)
        return [
            f"memory in theory, most loaded rank (GB): {gigabytes(self.total)} | {parts} "
            "(workspaces and fragmentation come on top)"
        ]


def gigabytes(num_bytes: float) -> str:
    """In GB of 10^9 bytes, with three digits that matter."""
    value = num_bytes / GIGABYTE
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def layout_of(
    config: TransformerConfig,
    parallel: ParallelConfig,
    dims: ParallelDims,
    micro_batch_size: int,
    num_microbatches: int,
) -> Layout:
    """How the formulas take a run."""
    held = partition(parallel, config.num_layers)
    layers = [sum(len(stage.layers) for stage in rank) for rank in held]
    chunks = len(held[0])
    return Layout(
        micro_batch_size=micro_batch_size,
        num_microbatches=num_microbatches,
        tp=dims.tp,
        pp=dims.pp,
        cp=dims.cp,
        dp=dims.dp * dims.cp,
        virtual_stages=chunks if chunks > 1 else None,
        first_rank_layers=layers[0] if len(set(layers)) > 1 else None,
        sequence_parallel=parallel.sequence_parallel,
        recompute=config.recompute,
        distributed_optimizer=parallel.data_parallel.use_distributed_optimizer,
    )


def plan_memory(
    config: TransformerConfig, padded_vocab_size: int, layout: Layout, precision: PrecisionConfig
) -> MemoryPlan:
    """The bytes of a rank. In fp32 the weights are their own master copy, and everything kept for
    the backward pass is twice as large."""
    is_fp32 = precision.params_format == "fp32"
    family = family_of(config)
    shard = family.shard_params(config, padded_vocab_size, layout)
    optimizer = layout.optimizer_bytes_per_parameter * (8 / 12 if is_fp32 else 1)
    activations = family.activation_bytes(config, padded_vocab_size, layout) / layout.cp
    grads = 2 if precision.grads_format == "bf16" else GRADIENT_BYTES
    return MemoryPlan(
        parameters=shard * (4 if is_fp32 else PARAMETER_BYTES),
        gradients=shard * grads,
        optimizer=shard * optimizer,
        activations=activations * (2 if is_fp32 else 1),
    )


def peak_lines(peaks: Sequence[int]) -> list[str]:
    """The most that each rank held, at the end of a run."""
    worst = max(range(len(peaks)), key=peaks.__getitem__)
    each = ", ".join(f"{rank}: {gigabytes(peak)}" for rank, peak in enumerate(peaks[:16]))
    more = f" and {len(peaks) - 16} more ranks" if len(peaks) > 16 else ""
    return [
        f"peak memory (GB): {gigabytes(peaks[worst])} on rank {worst}"
        + (f" | by rank: {each}{more}" if len(peaks) > 1 else "")
    ]
