"""The memory that a rank should need, its peaks, and out-of-memory errors with the allocated memory
and remedies.

The plan is that of the model family, on the most loaded rank of the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from trainyard.errors import DeviceMemoryError, HostMemoryError, lack_of_memory
from trainyard.models.config import TransformerConfig
from trainyard.models.families import family_of
from trainyard.models.parallel_layout import GRADIENT_BYTES, PARAMETER_BYTES, ParallelLayout
from trainyard.optim.precision import PrecisionConfig
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.dims import ParallelDims
from trainyard.parallel.pipeline.partition import partition
from trainyard.training.watch.memory_monitor import measure

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
        """All of it together."""
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
    """A number of bytes in GB (10^9 bytes), with three significant digits."""
    value = num_bytes / GIGABYTE
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def parallel_layout_of(
    config: TransformerConfig,
    parallel: ParallelConfig,
    dims: ParallelDims,
    micro_batch_size: int,
    num_microbatches: int,
    offloaded: float = 0.0,
) -> ParallelLayout:
    """The layout of a run, for the formulas. offloaded: share of the optimizer's state in host
    memory."""
    held = partition(parallel, config.all_layers)
    layers = [sum(len(stage.layers) for stage in rank) for rank in held]
    chunks = len(held[0])
    return ParallelLayout(
        micro_batch_size=micro_batch_size,
        num_microbatches=num_microbatches,
        tp=dims.tp,
        pp=dims.pp,
        cp=dims.cp,
        dp=dims.dp * dims.cp,
        ep=parallel.expert_model_parallel_size,
        expert_tp=parallel.expert_tp,
        virtual_stages=chunks if chunks > 1 else None,
        first_rank_layers=layers[0] if len(set(layers)) > 1 else None,
        sequence_parallel=parallel.sequence_parallel,
        recompute=config.recompute,
        sharding=parallel.data_parallel.sharding,
        instances=parallel.num_instances,
        offloaded=offloaded,
    )


def plan_memory(
    config: TransformerConfig,
    padded_vocab_size: int,
    layout: ParallelLayout,
    precision: PrecisionConfig,
    optimizer: str = "adam",
) -> MemoryPlan:
    """The bytes of a rank. In fp32 the weights are their own main copy, and activations are twice
    as large."""
    is_fp32 = precision.params_format == "fp32"
    family = family_of(config)
    shard = family.shard_params(config, padded_vocab_size, layout)
    layout = replace(layout, fp32=is_fp32, moment_bytes=precision.moment_bytes)
    activations = family.activation_bytes(config, padded_vocab_size, layout) / layout.cp
    shards = layout.shards(layout.dp)
    is_whole = shards.gradients == 1  # sharded ones are fp32
    ranks, count = layout.tp * layout.pp * layout.dp, layout.num_microbatches
    is_kept = precision.keeps_gradients(optimizer, num_microbatches=count, world_size=ranks)
    is_narrow = precision.grads_format != "fp32" or (is_kept and not is_fp32)
    grads = 2 if is_narrow and is_whole else GRADIENT_BYTES
    return MemoryPlan(
        parameters=shard * (4 if is_fp32 else PARAMETER_BYTES) / shards.parameters,
        gradients=shard * grads / shards.gradients,
        optimizer=shard * layout.optimizer_bytes_per_parameter,
        activations=activations * (2 if is_fp32 else 1),
    )


def peak_lines(peaks: Sequence[int]) -> list[str]:
    """Peak memory of each rank, for the log."""
    worst = max(range(len(peaks)), key=peaks.__getitem__)
    each = ", ".join(f"{rank}: {gigabytes(peak)}" for rank, peak in enumerate(peaks[:16]))
    more = f" and {len(peaks) - 16} more ranks" if len(peaks) > 16 else ""
    return [
        f"peak memory (GB): {gigabytes(peaks[worst])} on rank {worst}"
        + (f" | by rank: {each}{more}" if len(peaks) > 1 else "")
    ]


HOST_REMEDIES = (
    "more memory for the job",
    "a smaller --num-workers",
    "--no-async-save",
    "fewer ranks on a machine",
)
"""Remedies for host memory when weights and activations are on GPUs."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is an out-of-memory error, of torch or ours."""
    ours = isinstance(error, HostMemoryError | DeviceMemoryError)
    return ours or lack_of_memory(error) is not None


def helpful_flags(layout: ParallelLayout, plan: MemoryPlan | None, world_size: int) -> list[str]:
    """Options that lower memory and are not in use yet; first those for the larger part."""
    heavy_state = (
        plan is not None and plan.optimizer + plan.gradients + plan.parameters >= plan.activations
    )
    states, activations = [], []
    if layout.dp > 1 and layout.sharding == "no_shard":
        saving = ""
        if plan is not None:
            saving = f" (saves {gigabytes(plan.optimizer * (1 - 1 / layout.dp))} GB of each rank)"
        states.append(f"--use-distributed-optimizer{saving}")
    if layout.dp > 1 and layout.pp == 1 and layout.sharding in ("no_shard", "optim"):
        states.append("--data-parallel-sharding-strategy optim_grads_params (more communication)")
    if layout.tp > 1 and not layout.sequence_parallel:
        activations.append("--sequence-parallel")
    if layout.recompute == "none":
        activations.append("--recompute-activations (little time)")
    if layout.recompute != "full":
        activations.append("--recompute-granularity full (a third more computing)")
    if layout.micro_batch_size > 1:
        lower = layout.micro_batch_size // 2
        activations.append(f"--micro-batch-size {lower} (is {layout.micro_batch_size})")
    if world_size > layout.tp * layout.pp:
        states.append(f"--tensor-model-parallel-size {2 * layout.tp} (is {layout.tp})")
        states.append(f"--pipeline-model-parallel-size {2 * layout.pp} (is {layout.pp})")
    else:
        states.append(
            "more devices, with --use-distributed-optimizer or a larger "
            "--tensor-model-parallel-size"
        )
    return states + activations if heavy_state else activations + states


def out_of_memory_text(
    error: BaseException,
    rank: int,
    device: torch.device,
    held: Mapping[str, int],
    plan: MemoryPlan | None,
    flags: Sequence[str],
) -> str:
    """The error message. device: without free memory. held: `memory_monitor.measure` of it, and
    "total_bytes" if known."""
    where = "on the host" if device.type == "cpu" else f"on {device}"
    total = held.get("total_bytes")
    names = {"allocated_bytes": "allocated", "reserved_bytes": "reserved by torch"}
    parts = [f"{gigabytes(held[key])} GB {name}" for key, name in names.items() if key in held]
    parts = parts or [f"{gigabytes(held['rss_bytes'])} GB resident in this process"]
    if total is not None:
        parts.append(f"{gigabytes(total)} GB in total")
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if plan is not None:
        parts[-1] += (
            f"; the plan was {gigabytes(plan.total)} GB on the most loaded rank (parameters "
            f"{gigabytes(plan.parameters)}, gradients {gigabytes(plan.gradients)}, optimizer "
            f"{gigabytes(plan.optimizer)}, activations {gigabytes(plan.activations)})"
        )
    return (
        f"rank {rank} ran out of memory {where}: {', '.join(parts)}. What would help, the most "
        f"likely first: {'; '.join(flags)}. [{first}]"
    )


@contextmanager
def out_of_memory_explained(
    rank: int,
    world_size: int,
    device: torch.device,
    plan: Callable[[], tuple[MemoryPlan | None, ParallelLayout]],
) -> Iterator[None]:
    """Turns out-of-memory errors in this context into a HostMemoryError or DeviceMemoryError with
    the message of `out_of_memory_text`. plan: the planned memory, if the model has formulas for it,
    and the layout."""
    try:
        yield
    except Exception as error:
        kind = lack_of_memory(error)
        if kind is None:
            raise
        # With a GPU, no option of the model lowers host memory.
        if kind is HostMemoryError and device.type != "cpu":
            host = torch.device("cpu")
            text = out_of_memory_text(error, rank, host, measure(host), None, HOST_REMEDIES)
            raise HostMemoryError(text) from error
        planned, layout = plan()
        held = dict(measure(device))
        if device.type == "cuda":
            held["total_bytes"] = torch.cuda.get_device_properties(device).total_memory
        flags = helpful_flags(layout, planned, world_size)
        text = out_of_memory_text(error, rank, device, held, planned, flags)
        ran_out = HostMemoryError if device.type == "cpu" else DeviceMemoryError
        raise ran_out(text) from error
