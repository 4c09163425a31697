"""Degrees of parallelism and communication options, under Megatron-LM's names. Standard library
only.

Only options that change the definition of a result belong to a run's identity (the config digest,
and so its lineage). Tensor, sequence, pipeline, context and data parallelism, schedules, buckets
and overlap compute the same sums in another order. They are `execution` options, so a run can
resume under a different layout. Two things depend on a degree all the same: the padded vocabulary
(a multiple of the tensor-parallel size, recorded in the checkpoint's config.json), and which
attention weights dropout drops (each rank draws for its own heads). The dtype of gradient sums is
arithmetic and part of the digest (optim/precision.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainyard.config import (
    MAX_PROCESSES,
    MAX_RANKS,
    check_above_zero,
    check_at_least,
    check_at_most,
    execution,
)
from trainyard.errors import ConfigError
from trainyard.parallel.data_config import DataParallelConfig

ContextCommunication = Literal["p2p", "a2a", "allgather"]

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
PIPELINE_BEFORE_DATA = "tp-cp-ep-pp-dp"
AXES = ("tp", "cp", "ep", "dp", "pp")

TP = "--tensor-model-parallel-size"
PP = "--pipeline-model-parallel-size"
CP = "--context-parallel-size"
EP = "--expert-model-parallel-size"
ETP = "--expert-tensor-parallel-size"

AT_LEAST_ONE = (
    "nproc_per_node",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "microbatch_group_size_per_virtual_pipeline_stage",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Degrees of parallelism, pipeline layout, communication."""

    nproc_per_node: int = execution(1)
    """Ranks to start on this machine; omit it under torchrun."""

    # --- degrees; what they leave of the ranks is data parallel -------------------------------

    tensor_model_parallel_size: int = execution(1)
    """Ranks that share each layer's matrices."""
    sequence_parallel: bool = execution(False)
    """Shard activations between the matrices along the sequence, over the tensor-parallel ranks."""
    pipeline_model_parallel_size: int = execution(1)
    """Ranks that share the layers, one group of layers after another."""
    context_parallel_size: int = execution(1)
    """Ranks that share each sequence."""
    expert_model_parallel_size: int = execution(1)
    """Ranks that share the experts of each layer."""
    expert_tensor_parallel_size: int | None = execution(None)
    """Ranks that share the matrices of each expert; unset: as --tensor-model-parallel-size."""
    rank_order: str = execution(DEFAULT_ORDER)
    """Axes of the rank grid, the one with consecutive ranks first."""
    use_tp_pp_dp_mapping: bool = execution(False)
    """The same as --rank-order tp-cp-ep-pp-dp: pipeline neighbours closer than data-parallel
    ones."""

    # --- pipeline ----------------------------------------------------------------------------

    num_layers_per_virtual_pipeline_stage: int | None = execution(None)
    """Layers of each chunk under the interleaved schedule."""
    num_virtual_stages_per_pipeline_rank: int | None = execution(None)
    """Chunks of each rank under the interleaved schedule."""
    decoder_first_pipeline_num_layers: int | None = execution(None)
    """Layers of the first pipeline rank; the others share the rest evenly."""
    decoder_last_pipeline_num_layers: int | None = execution(None)
    """Layers of the last pipeline rank; the others share the rest evenly."""
    pipeline_model_parallel_layout: str | None = execution(None)
    """Every pipeline stage spelled out: E embedding, t transformer layer, m layer of multi-token
    prediction, L loss, | next stage; x*3 repeats x."""
    account_for_embedding_in_pipeline_split: bool = execution(False)
    """Count the embedding as a layer when distributing layers over stages."""
    account_for_loss_in_pipeline_split: bool = execution(False)
    """Count the output layer and loss as a layer when distributing layers over stages."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = execution(None)
    """Consecutive micro-batches of a chunk under the interleaved schedule; unset: the fewest that
    fit."""

    # --- context -----------------------------------------------------------------------------

    cp_comm_type: Literal["p2p", "a2a", "allgather"] = execution("p2p")
    """How attention reaches keys and values of other context-parallel ranks: around a ring (p2p),
    by exchanging heads for sequence (a2a), or by gathering all (allgather)."""

    # --- data --------------------------------------------------------------------------------

    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    """What the data-parallel ranks shard; buckets of gradients and their overlap."""
    ddp_average_in_collective: bool = execution(False)
    """Accepted and ignored: the loss is divided before the backward pass, so plain sums already are
    averages."""

    # --- tensor ------------------------------------------------------------------------------

    tp_comm_overlap: bool = execution(False)
    """Split tensor-parallel matrix products and overlap their communication with the parts."""
    distribute_saved_activations: bool = execution(False)
    """Refused: superseded by --sequence-parallel, as in Megatron-LM."""

    # --- transport ---------------------------------------------------------------------------

    distributed_backend: Literal["nccl", "gloo"] | None = execution(None)
    """Communication between ranks; unset: nccl on CUDA devices, gloo on CPUs."""
    distributed_timeout_minutes: float = execution(10.0)
    """How long a rank waits for the others before it considers one of them dead."""

    def __post_init__(self) -> None:
        """Raise ConfigError for contradictions; `check_model` checks what depends on the model."""
        check_at_least(self, 1, *AT_LEAST_ONE)
        check_at_most(self, MAX_RANKS, *AT_LEAST_ONE)
        check_at_most(self, MAX_PROCESSES, "nproc_per_node")
        check_above_zero(self, "distributed_timeout_minutes")
        self._check_order()
        self._check_tensor()
        self._check_pipeline()

    @property
    def order(self) -> str:
        """Axes of the grid of ranks, fastest first."""
        return PIPELINE_BEFORE_DATA if self.use_tp_pp_dp_mapping else self.rank_order

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model, or see one batch of samples."""
        tp, cp = self.tensor_model_parallel_size, self.context_parallel_size
        return tp * self.pipeline_model_parallel_size * cp

    @property
    def expert_tp(self) -> int:
        """Ranks that share the matrices of each expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def num_instances(self) -> int:
        """Groups of data-parallel ranks, each of which shards all that they shard."""
        return self.data_parallel.num_distributed_optimizer_instances

    @property
    def is_interleaved(self) -> bool:
        """Whether a pipeline rank holds several chunks, by the flags other than the layout."""
        return (
            self.num_layers_per_virtual_pipeline_stage is not None
            or (self.num_virtual_stages_per_pipeline_rank or 1) > 1
        )

    def _check_order(self) -> None:
        if sorted(self.rank_order.split("-")) != sorted(AXES):
            raise ConfigError(
                f"--rank-order {self.rank_order} must name each of {', '.join(AXES)} once, joined "
                f"by '-', as in {DEFAULT_ORDER} or {PIPELINE_BEFORE_DATA}"
            )
        if self.use_tp_pp_dp_mapping and self.rank_order not in (
            DEFAULT_ORDER,
            PIPELINE_BEFORE_DATA,
        ):
            raise ConfigError(
                f"--use-tp-pp-dp-mapping means --rank-order {PIPELINE_BEFORE_DATA}, and "
                f"--rank-order is {self.rank_order}; give one of them"
            )

    def _check_tensor(self) -> None:
        tp = self.tensor_model_parallel_size
        if self.sequence_parallel and tp == 1:
            raise ConfigError(
                f"--sequence-parallel shards over tensor-parallel ranks and {TP} is 1: give {TP} 2 "
                "or more, or leave --sequence-parallel out (--no-sequence-parallel over a file "
                "that has it)"
            )
        if self.tp_comm_overlap and not self.sequence_parallel:
            raise ConfigError(
                "--tp-comm-overlap hides gathering and scattering of the sequence, so it needs "
                f"--sequence-parallel (and {TP} 2 or more)"
            )
        if self.distribute_saved_activations:
            raise ConfigError(
                "--distribute-saved-activations is not offered: with --sequence-parallel the "
                "saved inputs of layers are cut over the tensor-parallel ranks already; use that"
            )

    def _check_pipeline(self) -> None:
        pp = self.pipeline_model_parallel_size
        if pp > 1 and self.data_parallel.fully_shards:
            raise ConfigError(
                f"{self.data_parallel.asked_by} does not work with {PP} ({pp}): each of the step's "
                "micro-batches would gather a stage's weights again; with pipeline parallelism use "
                f"--use-distributed-optimizer, or {PP} 1"
            )
        group = self.microbatch_group_size_per_virtual_pipeline_stage
        flag = "--microbatch-group-size-per-virtual-pipeline-stage"
        if group is None:
            return
        if not self.is_interleaved and self.pipeline_model_parallel_layout is None:
            raise ConfigError(
                f"{flag} {group} applies only to the interleaved schedule: give "
                "--num-virtual-stages-per-pipeline-rank too, or leave it out"
            )
        if group < pp:
            raise ConfigError(f"{flag} ({group}) must be at least {PP} ({pp})")
