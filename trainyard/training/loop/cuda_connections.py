"""CUDA_DEVICE_MAX_CONNECTIONS: in how many hardware queues a process hands its device work.

Tensor parallelism begins a collective and then the matrix product that hides it
(parallel/matmul.py, ring_matmul.py); so does context parallelism whose keys go round a ring. From
one queue the device takes them in this order. From several it may fill itself with the product
first, and the collective then comes behind what was to hide it: the result is the same, the time is
not. Megatron-LM demands 1 for these; here it is set, unless whoever started the process has. CUDA
reads it once, when it starts."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

from trainyard.parallel.config import ParallelConfig

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass(frozen=True, slots=True)
class Connections:
    """What was found and done."""

    message: str
    is_warning: bool = False


def hidden_communication(parallel: ParallelConfig) -> str | None:
    """The option that asks for communication behind matrix products; None if none does."""
    if parallel.tensor_model_parallel_size > 1:
        return f"--tensor-model-parallel-size {parallel.tensor_model_parallel_size}"
    if parallel.context_parallel_size > 1 and parallel.cp_comm_type == "p2p":
        return f"--context-parallel-size {parallel.context_parallel_size} --cp-comm-type p2p"
    return None


def arrange_connections(
    parallel: ParallelConfig, environ: MutableMapping[str, str], *, cuda_started: bool
) -> Connections | None:
    """Set the variable where it helps and nobody has; what there is to say of it.

    cuda_started: CUDA has read its variables in this process, so that setting one is too late."""
    option, found = hidden_communication(parallel), environ.get(VARIABLE)
    if option is None:
        return None
    if found is None and cuda_started:
        return Connections(
            f"{VARIABLE} is not set, and CUDA was started before: communication may come behind "
            f"the products that should hide it ({option}); set it to 1 when the program is started",
            is_warning=True,
        )
    if found is None:
        environ[VARIABLE] = "1"
        return Connections(
            f"{VARIABLE}=1, set here: communication begins before the products that hide it "
            f"({option})"
        )
    if found.strip() == "1":
        return Connections(f"{VARIABLE}=1, as it was given ({option})")
    return Connections(
        f"{VARIABLE}={found}, as it was given: communication may come behind the products that "
        f"should hide it ({option}); before Blackwell, 1 or nothing is faster",
        is_warning=True,
    )
