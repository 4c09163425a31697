"""Degrees of parallelism and the means of communication, under Megatron-LM's names. Standard
library only.

What of this belongs to the identity of a run (the config digest, and so its lineage)? Only what
changes the definition of its result. How a batch is cut over ranks does not: tensor, sequence,
pipeline, context and data parallelism, schedules, buckets and overlap compute the same sums, in
another order, as --nproc-per-node and --num-threads always did; so they are `execution`, and a run
may go on at other degrees. Two things depend on a degree all the same, and are told elsewhere: the
padded vocabulary (a multiple of the tensor-parallel size; in the checkpoint's config.json), and
which attention weights dropout drops (drawn by each rank for its own heads). The type in which
gradients are added up is a choice of arithmetic and in the digest (optim/precision.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainyard.config import execution
from trainyard.errors import ConfigError
from trainyard.parallel.data_config import DataParallelConfig

ContextCommunication = Literal["p2p", "a2a", "allgather"]

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
PIPELINE_BEFORE_DATA = "tp-cp-ep-pp-dp"
AXES = ("tp", "cp", "ep", "dp", "pp")

TP = "--tensor-model-parallel-size"
PP = "--pipeline-model-parallel-size"
CP = "--context-parallel-size"

AT_LEAST_ONE = (
    "nproc_per_node",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "microbatch_group_size_per_virtual_pipeline_stage",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How many processes work on one model, and how they talk."""

    nproc_per_node: int = execution(1)
    """Ranks to start on this machine; leave it out under torchrun."""

    # --- degrees; what they leave of the ranks is data parallel -------------------------------

    tensor_model_parallel_size: int = execution(1)
    """Ranks that share each layer's matrices."""
    sequence_parallel: bool = execution(False)
    """Cut what lies between the matrices, along the sequence, over the tensor-parallel ranks."""
    pipeline_model_parallel_size: int = execution(1)
    """Ranks that share the layers, one group of layers after another."""
    context_parallel_size: int = execution(1)
    """Ranks that share each sequence."""
    rank_order: str = execution(DEFAULT_ORDER)
    """Axes of the grid of ranks, the one whose neighbours have consecutive numbers first."""
    use_tp_pp_dp_mapping: bool = execution(False)
    """The same as --rank-order tp-cp-ep-pp-dp: pipeline neighbours nearer than data-parallel
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
    """Every stage spelt out: E embedding, t layer, L loss, | next stage, x*3 repeats."""
    account_for_embedding_in_pipeline_split: bool = execution(False)
    """Count the embedding as a layer when layers are shared out."""
    account_for_loss_in_pipeline_split: bool = execution(False)
    """Count the output layer and loss as a layer when layers are shared out."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = execution(None)
    """Micro-batches that a chunk takes in a row under the interleaved schedule; unset: the
    pipeline-parallel size."""

    # --- context -----------------------------------------------------------------------------

    cp_comm_type: Literal["p2p", "a2a", "allgather"] = execution("p2p")
    """How attention reaches the keys and values of other context-parallel ranks: they travel a
    ring, heads are exchanged for sequence, or all are gathered."""

    # --- data --------------------------------------------------------------------------------

    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    """Buckets of gradients, their overlap, and the distributed optimizer."""
    ddp_average_in_collective: bool = execution(False)
    """Taken for compatibility: the loss is divided before the backward pass here, so that plain
    sums are averages already."""

    # --- tensor ------------------------------------------------------------------------------

    tp_comm_overlap: bool = execution(False)
    """Cut the products of tensor parallelism up and hide their communication behind the pieces."""
    distribute_saved_activations: bool = execution(False)
    """Of Megatron-LM, superseded there and here by --sequence-parallel; refused."""

    # --- transport ---------------------------------------------------------------------------

    distributed_backend: Literal["nccl", "gloo"] | None = execution(None)
    """Communication between ranks; unset: nccl on CUDA devices, gloo on CPUs."""
    distributed_timeout_minutes: float = execution(10.0)
    """How long a rank waits for the others before it takes one of them for dead."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, in words. What depends on the model: `check_model`."""
        for name in AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.distributed_timeout_minutes <= 0:
            raise ConfigError(
                "--distributed-timeout-minutes must be above 0, got "
                f"{self.distributed_timeout_minutes}"
            )
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
    def is_interleaved(self) -> bool:
        """Whether a pipeline rank holds several chunks, as far as flags other than the layout
        say."""
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
                f"--sequence-parallel cuts over tensor-parallel ranks and {TP} is 1: give {TP} 2 "
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
                f"{flag} {group} is about the interleaved schedule: give "
                "--num-virtual-stages-per-pipeline-rank too, or leave it out"
            )
        if group < pp:
            raise ConfigError(f"{flag} ({group}) must be at least {PP} ({pp})")
