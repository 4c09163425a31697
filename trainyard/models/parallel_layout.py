"""How a run is spread over devices, as far as memory depends on it. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainyard.models.config import RecomputeGranularity, TransformerConfig
from trainyard.parallel.data_config import ShardingStrategy

PARAMETER_BYTES = 2
GRADIENT_BYTES = 4
MAIN_BYTES = 4
"""fp32 master weight."""
MOMENT_BYTES = 8
"""Two Adam moments in fp32."""
ONE_MOMENT_BYTES = 4
"""The momentum of Lion, SGD and Muon."""
OPTIMIZER_BYTES = MAIN_BYTES + MOMENT_BYTES


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes of a parameter by Megatron-LM's documentation of its distributed optimizer."""

    weight: float
    gradient: float
    state: float
    """Moments, and in fp32 the main weight, and the main gradient of fp16. Sharded over replicas by
    the distributed optimizer."""


BYTES_OF: dict[str, ParameterBytes] = {
    "bf16": ParameterBytes(PARAMETER_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES),  # 18, or 6 + 12/d
    "fp16": ParameterBytes(2, 2, 16),  # 20, or 4 + 16/d
    "fp32": ParameterBytes(4, 4, 8),  # 16, or 8 + 8/d
}
"""By the format of the weights; d is the number of replicas."""


@dataclass(frozen=True, slots=True)
class ShardCounts:
    """Over how many ranks each kind of a model's memory is spread; 1: every rank has all of it."""

    parameters: float = 1
    gradients: float = 1
    optimizer: float = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Degrees of parallelism, micro-batches and what saves memory."""

    micro_batch_size: int = 1
    num_microbatches: int | None = None
    """Micro-batches of a step on each replica; unset: as many as the pipeline can hold."""
    tp: int = 1
    pp: int = 1
    cp: int = 1
    """Ranks that share each sequence; Megatron-LM's report ignores them."""
    dp: int = 1
    ep: int = 1
    expert_tp: int | None = None
    """Tensor-parallel size inside experts; unset: tp."""
    layers_per_virtual_stage: int | None = None
    """Layers of one chunk under the interleaved schedule; unset: the plain schedule."""
    virtual_stages: int | None = None
    """Chunks of a pipeline rank, as an alternative to the layers of a chunk."""
    first_rank_layers: int | None = None
    """Layers of the first pipeline rank, where ranks differ."""
    sequence_parallel: bool = False
    recompute: RecomputeGranularity = "none"
    sharding: ShardingStrategy = "no_shard"
    """What the replicas shard."""
    instances: int = 1
    """Groups of replicas, each of which shards all that they shard."""
    fp32: bool = False
    """Weights and activations in fp32 without a master copy; not in Megatron-LM's report."""
    gradient_bytes: int = GRADIENT_BYTES
    """Of a parameter's gradient, where it is not that of the format of weights."""
    moment_bytes: float = MOMENT_BYTES
    """Of a parameter's moments; not in Megatron-LM's report."""
    offloaded: float = 0.0
    """Share of the optimizer's state in host memory; not in Megatron-LM's report."""

    @property
    def is_interleaved(self) -> bool:
        """Whether a pipeline rank holds several chunks."""
        return self.layers_per_virtual_stage is not None or (self.virtual_stages or 1) > 1

    @property
    def optimizer_bytes_per_parameter(self) -> float:
        """Master weight and moments, sharded over replicas unless nothing is."""
        main = 0 if self.fp32 else MAIN_BYTES
        here = (main + self.moment_bytes) * (1 - self.offloaded)
        return here / self.shards(self.dp).optimizer

    def shards(self, replicas: float) -> ShardCounts:
        """Of parameters that this many ranks hold alike."""
        count = replicas / self.instances
        return {
            "no_shard": ShardCounts(),
            "optim": ShardCounts(optimizer=count),
            "optim_grads": ShardCounts(gradients=count, optimizer=count),
            "optim_grads_params": ShardCounts(count, count, count),
        }[self.sharding]

    def layers_as_on_first(self, config: TransformerConfig) -> int:
        """Layers of the model if every rank had as many as the first one, the most loaded."""
        uneven = self.first_rank_layers
        return config.all_layers if uneven is None else uneven * self.pp

    def equal_layers(self, config: TransformerConfig) -> float:
        """`layers_as_on_first` by what they keep, where layers differ."""
        on_first = -(-self.layers_as_on_first(config) // self.pp)
        busiest = config.equal_layers(busiest_layers(config, on_first))
        return busiest * self.layers_as_on_first(config) / on_first

    def activation_growth(self, config: TransformerConfig) -> tuple[float, int]:
        """(growth under the interleaved schedule, micro-batches in flight on the first stage)."""
        if self.is_interleaved:
            chunks = self.virtual_stages
            if chunks is None:
                assert self.layers_per_virtual_stage is not None
                chunks = config.all_layers // self.pp // self.layers_per_virtual_stage
            penalty = 1 + (self.pp - 1) / (self.pp * chunks)
            return penalty, math.ceil(penalty * self.pp)
        return 1.0, min(self.num_microbatches or self.pp, self.pp)


def busiest_layers(config: TransformerConfig, count: int) -> range:
    """Of pipeline stages with this many layers, those of the one that keeps most for a sample: the
    one with inner layers, else the first."""
    starts = range(0, config.all_layers, count)
    stages = [range(start, min(start + count, config.all_layers)) for start in starts]
    return next((stage for stage in stages if config.num_inner_layers(stage)), stages[0])
