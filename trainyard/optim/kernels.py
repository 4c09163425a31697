"""Adam kernels of other libraries, where they are installed, behind one signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from trainyard.errors import ConfigError
from trainyard.optim.config import OptimizerBackend

CHUNK_SIZE = 2048 * 32
"""Numbers that a block of such a kernel works on, as both libraries call them."""

DECOUPLED_DECAY = 1
"""Their mode in which weight decay is not part of the gradient."""


class AdamUpdate(Protocol):
    """One AdamW step in place; tensors: gradients, parameters, first and second moments."""

    def __call__(
        self,
        tensors: Sequence[list[Tensor]],
        learning_rate: float,
        betas: tuple[float, float],
        eps: float,
        num_updates: int,
        weight_decay: float,
    ) -> None:
        """Update."""


def adam_kernel(backend: OptimizerBackend) -> AdamUpdate | None:
    """The kernel of a library; None for torch's own. ConfigError when it cannot be loaded."""
    if backend in ("auto", "torch"):
        return None
    try:
        return _MultiTensor(_apex() if backend == "apex" else _transformer_engine())
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


class _MultiTensor:
    """Both libraries' kernel has apex's signature."""

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
