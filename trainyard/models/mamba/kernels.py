"""Chooses who computes convolution and scan (--mamba-backend)."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from trainyard.errors import ConfigError
from trainyard.kernels.available import TRITON
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.mamba.pattern import MAMBA

log = logging.getLogger(__name__)

MambaBackend = Literal["auto", "torch", "triton", "mamba_ssm"]
"""Values of --mamba-backend."""

PACKAGES = ("mamba_ssm", "causal_conv1d")
TILES = (16, 32, 64, 128)
"""Sizes of heads and states that the Triton kernels take."""


@dataclass(frozen=True, slots=True)
class MambaChoice:
    """Who computes convolution and scan, and why."""

    backend: MambaBackend
    """Any but auto."""
    reason: str


@dataclass(frozen=True, slots=True)
class MambaSetting:
    """What the choice depends on."""

    device: str
    """cuda or cpu."""
    missing: tuple[str, ...] = ()
    """Packages of mamba-ssm that are not installed."""
    has_triton: bool = True
    deterministic: bool = False
    sizes: tuple[int, int] = (64, 128)
    """Channels of a head, numbers of a state."""

    def lacks(self, backend: MambaBackend) -> str | None:
        """Why it is not available, None if it is."""
        if backend == "torch":
            return None
        if self.device != "cuda":
            return f"it needs a CUDA device, not {self.device}"
        if backend == "triton":
            if not self.has_triton:
                return "Triton is not installed"
            if not set(self.sizes) <= set(TILES):
                return (
                    f"--mamba-head-dim {self.sizes[0]} and --mamba-state-dim {self.sizes[1]} must "
                    "both be one of 16, 32, 64 and 128"
                )
        if backend == "mamba_ssm":
            if self.missing:
                return f"{' and '.join(self.missing).replace('_', '-')} not installed"
            if self.deterministic:
                return "it adds gradients in any order (--deterministic-mode)"
        return None


def choose_mamba(request: MambaBackend, setting: MambaSetting) -> MambaChoice:
    """The requested backend, or the fastest; ConfigError says why it is unavailable."""
    if request == "auto":
        fastest: tuple[MambaBackend, ...] = ("triton", "mamba_ssm")
        for backend in fastest:
            if setting.lacks(backend) is None:
                return MambaChoice(backend, "the fastest that is available")
        return MambaChoice("torch", f"of triton, {setting.lacks('triton')}")
    problem = setting.lacks(request)
    if problem is None:
        return MambaChoice(request, f"asked for with --mamba-backend {request}")
    raise ConfigError(
        f"--mamba-backend {request} is not available here: {problem}. Use --mamba-backend auto, or "
        "torch, which always works"
    )


def report_mamba(config: MambaConfig, device: torch.device, *, say: bool) -> None:
    """Raise ConfigError if the requested backend is unavailable; say: log it with the reason."""
    if MAMBA not in config.layer_kinds:
        return
    choice = choose_mamba(config.mamba_backend, _setting(config, device.type))
    if say:
        log.info("mamba backend=%s: %s", choice.backend, choice.reason)


def backend_on_cuda(config: MambaConfig) -> MambaBackend:
    """Which computes what is on CUDA. Inference may lack packages that training had, so another
    replaces it; training refuses it before building anything (`report_mamba`)."""
    if not torch.cuda.is_available():
        return "torch"
    setting = _setting(config, "cuda")
    request = config.mamba_backend
    if setting.lacks(request) is not None:
        request = "auto"
    return choose_mamba(request, setting).backend


def _setting(config: MambaConfig, device: str) -> MambaSetting:
    return MambaSetting(
        device=device,
        missing=_missing(),
        has_triton=TRITON,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        sizes=(config.mamba_head_dim, config.mamba_state_dim),
    )


@lru_cache(maxsize=1)
def _missing() -> tuple[str, ...]:
    return tuple(name for name in PACKAGES if importlib.util.find_spec(name) is None)
