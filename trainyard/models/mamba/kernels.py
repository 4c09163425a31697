"""The kernels of mamba-ssm and causal-conv1d in place of `conv` and `scan`, where they are
installed on CUDA, and the choice between the two (--mamba-backend)."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from trainyard.errors import ConfigError
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.mamba.pattern import MAMBA

log = logging.getLogger(__name__)

MambaBackend = Literal["auto", "torch", "mamba_ssm"]
"""Values of --mamba-backend."""

PACKAGES = ("mamba_ssm", "causal_conv1d")

_eager: Callable[[Any], Any] = torch.compiler.disable
"""Triton kernels that autograd runs by functions of their own."""


@dataclass(frozen=True, slots=True)
class MambaChoice:
    """Who computes convolution and scan, and why."""

    backend: MambaBackend
    """torch or mamba_ssm."""
    reason: str


def choose_mamba(
    request: MambaBackend, device: str, missing: tuple[str, ...], *, deterministic: bool
) -> MambaChoice:
    """The requested backend, or the fastest; ConfigError says why it is unavailable. device: cuda
    or cpu. missing: packages that are not installed."""
    if request == "torch":
        return MambaChoice("torch", "asked for with --mamba-backend torch")
    problem = None
    if device != "cuda":
        problem = f"mamba-ssm needs a CUDA device, not {device}"
    elif missing:
        problem = f"{' and '.join(missing).replace('_', '-')} not installed"
    elif deterministic:
        problem = "mamba-ssm adds gradients in any order (--deterministic-mode)"
    if problem is None:
        asked = request == "mamba_ssm"
        reason = "asked for with --mamba-backend mamba_ssm" if asked else "installed"
        return MambaChoice("mamba_ssm", reason)
    if request == "mamba_ssm":
        raise ConfigError(
            f"--mamba-backend mamba_ssm is not available here: {problem}. Use --mamba-backend "
            "auto, or torch, which always works"
        )
    return MambaChoice("torch", problem)


def report_mamba(config: MambaConfig, device: torch.device, *, say: bool) -> None:
    """Raise ConfigError if the requested backend is unavailable; say: log it with the reason."""
    if MAMBA not in config.layer_kinds:
        return
    choice = _choice(config.mamba_backend, device.type)
    if say:
        log.info("mamba backend=%s: %s", choice.backend, choice.reason)


def uses_mamba_ssm(config: MambaConfig) -> bool:
    """Whether layers on CUDA use mamba-ssm. Inference may lack packages that training had, so torch
    replaces missing ones; training refuses them before building anything (`report_mamba`)."""
    if not torch.cuda.is_available():
        return False
    request: MambaBackend = "torch" if config.mamba_backend == "torch" else "auto"
    return _choice(request, "cuda").backend == "mamba_ssm"


def _choice(request: MambaBackend, device: str) -> MambaChoice:
    deterministic = torch.are_deterministic_algorithms_enabled()
    return choose_mamba(request, device, _missing(), deterministic=deterministic)


@lru_cache(maxsize=1)
def _missing() -> tuple[str, ...]:
    return tuple(name for name in PACKAGES if importlib.util.find_spec(name) is None)


@_eager
def fused_conv(x: Tensor, weight: Tensor, bias: Tensor, documents: Tensor | None) -> Tensor:
    """As `conv.causal_conv`."""
    causal_conv1d: Any = importlib.import_module("causal_conv1d")
    out: Tensor = causal_conv1d.causal_conv1d_fn(
        x.transpose(1, 2),
        weight.squeeze(1),
        bias,
        seq_idx=None if documents is None else documents.int().contiguous(),
        activation="silu",
    )
    return out.transpose(1, 2)


@_eager
def fused_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    chunk_size: int,
    documents: Tensor | None,
) -> Tensor:
    """As `scan.chunked_scan` from a state of 0, without the state in the end."""
    combined: Any = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    out: Tensor = combined.mamba_chunk_scan_combined(
        x.flatten(2, 3),
        dt.flatten(2, 3),
        a.flatten(),
        b,
        c,
        chunk_size,
        seq_idx=None if documents is None else documents.int().contiguous(),
    )
    return out.view_as(x)
