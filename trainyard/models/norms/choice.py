"""Whose kernel normalises, and why: a pure function of what was asked for, the device and what the
model needs. Standard library only.

torch's operators are what `auto` takes: compiled with a layer they become one kernel with what
stands around them, and the fastest whole steps that were measured had them so. Kernels of other
packages are taken when they are asked for by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.attention.choice import Device
from trainyard.errors import ConfigError

NormRequest = Literal["auto", "torch", "apex", "transformer_engine"]
NormBackend = Literal["torch", "apex", "transformer_engine"]

NAMES = {"apex": "apex", "transformer_engine": "Transformer Engine"}

FAST_SIZES = (
    *(1024, 1536, 2048, 2304, 3072, 3840, 4096, 5120, 6144, 8192, 10240, 12288, 12800, 15360),
    *(16384, 18432, 20480, 24576, 25600, 30720, 32768, 40960, 49152, 65536),
)
"""Widths that apex's persistent LayerNorm (apex.contrib) is compiled for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormNeeds:
    """What a normalisation asks of its kernel."""

    normalization: str
    """LayerNorm or RMSNorm."""
    size: int
    """Channels."""
    dtype: str
    """Of the weights: bfloat16."""
    fp32_input: bool = False
    """What is normalised is fp32, whatever the weights are (--fp32-residual-connection)."""
    deterministic: bool = False
    compiled: bool = False
    """Layers run under torch.compile."""


@dataclass(frozen=True, slots=True)
class NormChoice:
    """A backend, its kernel, and why."""

    backend: NormBackend
    kernel: str
    """layer_norm, rms_norm; fused_layer_norm, fused_rms_norm, fast_layer_norm (apex); LayerNorm,
    RMSNorm (Transformer Engine)."""
    reason: str


def choose_norm(request: NormRequest, device: Device, needs: NormNeeds) -> NormChoice:
    """The backend that was asked for, or torch; ConfigError says why it cannot be had."""
    if request == "auto" or request == "torch":  # narrows the type
        kernel = "rms_norm" if needs.normalization == "RMSNorm" else "layer_norm"
        return NormChoice("torch", kernel, _reason_of_torch(request, device, needs))
    problem = norm_problem(request, device, needs)
    if problem is not None:
        raise ConfigError(
            f"--norm-backend {request} cannot be had here: {NAMES[request]} {problem}. Use "
            "--norm-backend auto, or torch, which always works"
        )
    reason = f"asked for with --norm-backend {request}"
    if needs.compiled:
        reason += "; compiled layers are cut in two at each"
    if request == "transformer_engine":
        return NormChoice(request, needs.normalization, reason)
    return NormChoice("apex", _apex_kernel(device, needs), reason)


def norm_problem(request: NormBackend, device: Device, needs: NormNeeds) -> str | None:
    """Why a package cannot do what is needed, as a verb phrase; None if it can."""
    if request == "torch":
        return None
    if device.type != "cuda":
        return f"needs a CUDA device, not {device.type}"
    installed = device.apex_norm if request == "apex" else device.transformer_engine
    if not installed:
        return "is not installed" + (" with its fused_layer_norm_cuda" if request == "apex" else "")
    if needs.deterministic:
        return "was not proved bitwise reproducible in its backward pass (--deterministic-mode)"
    if request == "transformer_engine":
        if needs.dtype not in ("float32", "bfloat16", "float16"):
            return f"computes in fp32, bf16 and fp16, not {needs.dtype}"
        if needs.fp32_input and needs.dtype != "float32":
            return (
                f"rounds what it normalises to {needs.dtype} first, which "
                "--fp32-residual-connection is against"
            )
    return None


def _apex_kernel(device: Device, needs: NormNeeds) -> str:
    if needs.normalization == "RMSNorm":
        return "fused_rms_norm"
    mixed = needs.fp32_input and needs.dtype != "float32"
    if device.apex_fast_norm and needs.size in FAST_SIZES and not mixed:
        return "fast_layer_norm"
    return "fused_layer_norm"


def _reason_of_torch(request: NormRequest, device: Device, needs: NormNeeds) -> str:
    if request == "torch":
        return "asked for with --norm-backend torch"
    if device.type != "cuda":
        return f"the one for {device.type}"
    if needs.compiled:
        return "compiled with what stands around it, as in the fastest steps measured"
    return "the one that needs no package; --compile-layers on makes it fast"
