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

DEFAULT_BUCKET_SIZE = 40_000_000
"""Numbers in a bucket that overlaps: enough to fill the network, few enough to start early."""
PER_RANK_BUCKET_SIZE = 1_000_000
"""Minimum for each rank of a large group, whose ring splits a bucket by its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelConfig:
    """Buckets of gradients, their overlap with backward, and the distributed optimizer.

    None of it changes what a step is: sums are over the same ranks, in an order that may differ
    between three ranks and more."""

    use_distributed_optimizer: bool = execution(False)
    """Keep each number of the optimizer's state on one data-parallel rank only (ZeRO-1)."""
    overlap_grad_reduce: bool = execution(False)
    """Add gradients up over ranks while backward still works on earlier layers."""
    overlap_param_gather: bool = execution(False)
    """Fetch updated parameters while forward already works; with --use-distributed-optimizer."""
    ddp_bucket_size: int | None = execution(None)
    """Numbers in a bucket; unset: 40 million or a million for each rank with
    --overlap-grad-reduce, else all of them."""
    ddp_num_buckets: int | None = execution(None)
    """How many buckets to aim at, in place of --ddp-bucket-size."""
    ddp_pad_buckets_for_high_nccl_busbw: bool = execution(False)
    """Pad the pieces of the distributed optimizer to sizes that NCCL moves fastest."""

    def __post_init__(self) -> None:
        """Raise ConfigError for options that contradict each other."""
        check_at_least(self, 1, "ddp_bucket_size", "ddp_num_buckets")
        if self.ddp_bucket_size is not None and self.ddp_num_buckets is not None:
            raise ConfigError("give --ddp-bucket-size or --ddp-num-buckets, not both")
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            raise ConfigError(
                "--overlap-param-gather needs --use-distributed-optimizer; add it, or leave this "
                "out"
            )
        if self.ddp_pad_buckets_for_high_nccl_busbw and not self.use_distributed_optimizer:
            raise ConfigError(
                "--ddp-pad-buckets-for-high-nccl-busbw needs --use-distributed-optimizer; add it, "
                "or leave this out"
            )

    def bucket_size(self, num_parameters: int, num_ranks: int) -> int | None:
        """Numbers in a bucket of a model of so many parameters; None for one bucket."""
        if self.ddp_num_buckets is not None:
            return -(-num_parameters // self.ddp_num_buckets)
        if self.ddp_bucket_size is not None or not self.overlap_grad_reduce:
            return self.ddp_bucket_size
        return max(DEFAULT_BUCKET_SIZE, PER_RANK_BUCKET_SIZE * num_ranks)


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
    """Every stage spelled out: E embedding, t layer, L loss, | next stage, x*3 repeats."""
    account_for_embedding_in_pipeline_split: bool = execution(False)
    """Count the embedding as a layer when distributing layers over stages."""
    account_for_loss_in_pipeline_split: bool = execution(False)
    """Count the output layer and loss as a layer when distributing layers over stages."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = execution(None)
    """Consecutive micro-batches of a chunk under the interleaved schedule; unset: the
    pipeline-parallel size."""

    # --- context -----------------------------------------------------------------------------

    cp_comm_type: Literal["p2p", "a2a", "allgather"] = execution("p2p")
    """How attention reaches keys and values of other context-parallel ranks: around a ring (p2p),
    by exchanging heads for sequence (a2a), or by gathering all (allgather)."""

    # --- data --------------------------------------------------------------------------------

    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    """Buckets of gradients, their overlap, and the distributed optimizer."""
    ddp_average_in_collective: bool = execution(False)
    """Accepted for compatibility, no effect: the loss is divided before the backward pass, so
    plain sums are averages already."""

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
