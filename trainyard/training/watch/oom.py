"""Running out of memory, of the host or of a GPU, in words that help: what was held, what was
foreseen, what would help."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from trainyard.errors import DeviceMemoryError, HostMemoryError, lack_of_memory
from trainyard.models.layout import Layout
from trainyard.training.watch.memory_monitor import measure
from trainyard.training.watch.memory_report import MemoryPlan, gigabytes

FOR_THE_HOST = (
    "more memory for the job",
    "a smaller --num-workers",
    "no --async-save",
    "fewer ranks on a machine",
)
"""What lowers the host's memory where weights and activations lie on GPUs."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no more memory, or tells that of another one."""
    ours = isinstance(error, HostMemoryError | DeviceMemoryError)
    return ours or lack_of_memory(error) is not None


def helpful_flags(layout: Layout, plan: MemoryPlan | None, world_size: int) -> list[str]:
    """What lowers memory and is not done yet: first what lowers the larger part, as far as that is
    known."""
    heavy_state = (
        plan is not None and plan.optimizer + plan.gradients + plan.parameters >= plan.activations
    )
    states, activations = [], []
    if layout.dp > 1 and not layout.distributed_optimizer:
        saving = ""
        if plan is not None:
            saving = f" (saves {gigabytes(plan.optimizer * (1 - 1 / layout.dp))} GB of each rank)"
        states.append(f"--use-distributed-optimizer{saving}")
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
    """The message. device: what has no more memory; held: `memory_monitor.measure` of it, and
    "total_bytes" if known."""
    where = "on the host" if device.type == "cpu" else f"on {device}"
    total = held.get("total_bytes")
    names = {"allocated_bytes": "allocated", "reserved_bytes": "reserved by torch"}
    parts = [f"{gigabytes(held[key])} GB {name}" for key, name in names.items() if key in held]
    parts = parts or [f"{gigabytes(held['rss_bytes'])} GB resident in this process"]
    if total is not None:
        parts.append(f"{gigabytes(total)} GB there are")
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
    plan: Callable[[], tuple[MemoryPlan | None, Layout]],
) -> Iterator[None]:
    """Running out of memory inside is a HostMemoryError or DeviceMemoryError that says all that.
    plan: what was foreseen, where formulas for the model are known, and the layout."""
    try:
        yield
    except Exception as error:
        kind = lack_of_memory(error)
        if kind is None:
            raise
        # Beside a GPU the host runs out of its own, and no layout of the model helps it.
        if kind is HostMemoryError and device.type != "cpu":
            host = torch.device("cpu")
            text = out_of_memory_text(error, rank, host, measure(host), None, FOR_THE_HOST)
            raise HostMemoryError(text) from error
        foreseen, layout = plan()
        held = dict(measure(device))
        if device.type == "cuda":
            held["total_bytes"] = torch.cuda.get_device_properties(device).total_memory
        flags = helpful_flags(layout, foreseen, world_size)
        text = out_of_memory_text(error, rank, device, held, foreseen, flags)
        ran_out = HostMemoryError if device.type == "cpu" else DeviceMemoryError
        raise ran_out(text) from error
