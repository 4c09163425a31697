"""Optimizer kernels: which one is used, and Adam kernels of other libraries behind one signature.

`auto` takes what the fastest whole steps measured had: on a GPU AdamW in one pass, else torch's
operators."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from trainyard.errors import ConfigError
from trainyard.optim.config import OptimizerBackend, OptimizerConfig

log = logging.getLogger(__name__)

CHUNK_SIZE = 2048 * 32
"""Numbers that a block of such a kernel works on, as both libraries call them."""

DECOUPLED_DECAY = 1
"""Their mode in which weight decay is not part of the gradient."""

MODULES = {"apex": "amp_C", "transformer_engine": "transformer_engine", "triton": "triton"}
"""What has to be there of each package."""
NAMES = {"apex": "apex", "transformer_engine": "Transformer Engine", "triton": "Triton"}
KERNELS = {
    "adam": "fused_adamw",
    "muon": "newton_schulz",
    "lion": "foreach",
    "sgd": "foreach",
}
"""torch's."""
FLAT = "flat_adamw"


@dataclass(frozen=True, slots=True)
class OptimizerChoice:
    """A backend, its kernel, and why."""

    backend: Literal["triton", "torch", "apex", "transformer_engine"]
    kernel: str
    """flat_adamw (Triton); fused_adamw, foreach (torch); multi_tensor_adam (the packages)."""
    reason: str


def is_installed(module: str) -> bool:
    """Whether a module could be imported, by its name alone."""
    return importlib.util.find_spec(module) is not None


def choose_optimizer(
    config: OptimizerConfig, device_type: str, installed: Callable[[str], bool] = is_installed
) -> OptimizerChoice:
    """The backend that was asked for, or torch; ConfigError says why it is not available.

    device_type: where the parameters are; installed: answers for the modules of `MODULES`."""
    request, kernel = config.optimizer_backend, KERNELS[config.optimizer]
    if request == "torch":
        return OptimizerChoice("torch", kernel, "asked for with --optimizer-backend torch")
    if request == "auto":
        if device_type != "cuda":
            return OptimizerChoice("torch", kernel, f"the one for {device_type}")
        if config.optimizer != "adam" or not installed("triton"):
            return OptimizerChoice("torch", kernel, "the only one here for CUDA")
        return OptimizerChoice("triton", FLAT, "one pass, which also writes the weights")
    problem = None
    if device_type != "cuda":
        problem = f"needs a CUDA device, not {device_type}"
    elif not installed(MODULES[request]):
        problem = "is not installed" + (" with its amp_C" if request == "apex" else "")
    if problem is not None:
        raise ConfigError(
            f"--optimizer-backend {request} is not available here: {NAMES[request]} {problem}. Use "
            "--optimizer-backend auto, or torch, which always works"
        )
    reason = f"asked for with --optimizer-backend {request}"
    return OptimizerChoice(request, FLAT if request == "triton" else "multi_tensor_adam", reason)


def report_optimizer(
    config: OptimizerConfig, device: torch.device, *, say: bool = True
) -> OptimizerChoice:
    """Choose for a device; say: in the log too, with why."""
    choice = choose_optimizer(config, device.type)
    if say:
        log.info(
            "optimizer=%s backend=%s kernel=%s: %s",
            *(config.optimizer, choice.backend, choice.kernel, choice.reason),
        )
        if config.offloaded:
            log.info("optimizer state in host memory: %.0f %%", 100 * config.offloaded)
    return choice


# --- kernels of other libraries ----------------------------------------------------------------


def adam_kernel(backend: OptimizerBackend) -> MultiTensorAdam | None:
    """The kernel of a library; None for torch's and ours. ConfigError when it cannot be loaded."""
    if backend in ("auto", "torch", "triton"):
        return None
    try:
        return MultiTensorAdam(_apex() if backend == "apex" else _transformer_engine())
    except ImportError as error:
        raise ConfigError(
            f"--optimizer-backend {backend}: {error}; install it, or use --optimizer-backend "
            "torch, which needs nothing"
        ) from error


def _apex() -> Any:
    from amp_C import multi_tensor_adam  # type: ignore[import-not-found]

    return multi_tensor_adam


def _transformer_engine() -> Any:
    import transformer_engine.pytorch  # type: ignore[import-not-found]  # noqa: F401  # loads the next
    from transformer_engine_torch import (  # type: ignore[import-not-found]
        multi_tensor_adam,
    )

    return multi_tensor_adam


class MultiTensorAdam:
    """AdamW by the kernel of a library; both have apex's signature."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._no_overflow: Tensor | None = None

    def __call__(
        self,
        tensors: Sequence[list[Tensor]],
        learning_rate: float,
        betas: tuple[float, float],
        eps: float,
        num_updates: int,
        weight_decay: float,
    ) -> None:
        """One step in place; tensors: gradients, parameters, first and second moments."""
        if self._no_overflow is None:  # one that says "skip": whether to is decided elsewhere
            self._no_overflow = torch.zeros(1, dtype=torch.int32, device=tensors[0][0].device)
        self._kernel(
            CHUNK_SIZE,
            self._no_overflow,
            [list(held) for held in tensors],
            learning_rate,
            *betas,
            eps,
            num_updates,
            DECOUPLED_DECAY,
            1,  # bias correction
            weight_decay,
        )
