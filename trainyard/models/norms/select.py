"""Chooses the normalisation kernel: a pure function of the request, the device and what the model
needs.

`auto` takes torch's operators: compiled with a layer they fuse with their neighbours, and the
fastest whole steps measured had them so. On GPUs a kernel of ours has their backward pass. Kernels
of other packages are used on request."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from trainyard.attention.select import Device, probe_device
from trainyard.errors import ConfigError
from trainyard.kernels.available import TRITON
from trainyard.models.config import TransformerConfig
from trainyard.models.norms.kernels import NormBackend, NormChoice, NormKernel, build_norm_kernel
from trainyard.models.norms.own_backward import WIDTHS, OwnBackward

log = logging.getLogger(__name__)

NormRequest = Literal["auto", "torch", "apex", "transformer_engine"]

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
    """The input is fp32 with weights of any type (--fp32-residual-connection)."""
    deterministic: bool = False
    compiled: bool = False
    """Layers run under torch.compile."""


def choose_norm(request: NormRequest, device: Device, needs: NormNeeds) -> NormChoice:
    """The requested backend, or torch; ConfigError says why it is unavailable."""
    if request == "auto" or request == "torch":  # narrows the type
        kernel = "rms_norm" if needs.normalization == "RMSNorm" else "layer_norm"
        return NormChoice("torch", kernel, _reason_of_torch(request, device, needs))
    problem = norm_problem(request, device, needs)
    if problem is not None:
        raise ConfigError(
            f"--norm-backend {request} is not available here: {NAMES[request]} {problem}. Use "
            "--norm-backend auto, or torch, which always works"
        )
    reason = f"asked for with --norm-backend {request}"
    if needs.compiled:
        reason += "; compiled layers are cut in two at each"
    if request == "transformer_engine":
        return NormChoice(request, needs.normalization, reason)
    return NormChoice("apex", _apex_kernel(device, needs), reason)


def norm_problem(request: NormBackend, device: Device, needs: NormNeeds) -> str | None:
    """Why a package does not fit, as a verb phrase; None if it does."""
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
                f"rounds its input to {needs.dtype} first, which "
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
    reason = "the one that needs no package; --compile-layers on makes it fast"
    if needs.compiled:
        reason = "compiled with what stands around it, as in the fastest steps measured"
    if TRITON and needs.size in WIDTHS:
        reason += "; gradients by a kernel of ours, except in layers with 8-bit products"
    return reason


def norm_kernel(config: TransformerConfig, size: int) -> NormKernel | None:
    """The kernel for one normalisation of `size` channels; None: torch's own operators, forward
    and backward.

    Inference may lack packages that training had, so torch replaces a missing one. Training refuses
    it before building anything (`report_norm`)."""
    request = config.norm_backend
    if request == "torch" or not torch.cuda.is_available():
        return None
    if request == "auto":
        return OwnBackward() if TRITON and size in WIDTHS else None
    device, needs = _device(), norm_needs(config, torch.get_default_dtype(), size)
    if norm_problem(request, device, needs) is not None:
        return None
    return build_norm_kernel(choose_norm(request, device, needs))


@lru_cache(maxsize=1)
def _device() -> Device:
    return probe_device("cuda")


def norm_needs(
    config: TransformerConfig,
    dtype: torch.dtype,
    size: int | None = None,
    *,
    compiled: bool = False,
) -> NormNeeds:
    """What a normalisation of `size` channels (unset: the residual stream) asks of its kernel."""
    return NormNeeds(
        normalization=config.normalization,
        size=size or config.hidden_size,
        dtype=str(dtype).removeprefix("torch."),
        fp32_input=config.fp32_residual_connection,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        compiled=compiled,
    )


def report_norm(
    config: TransformerConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    compiled: bool,
    say: bool = True,
) -> NormChoice:
    """The kernel for the residual stream; ConfigError if it is unavailable. say: log it with the
    reason."""
    needs = norm_needs(config, dtype, compiled=compiled)
    choice = choose_norm(config.norm_backend, probe_device(device.type), needs)
    if say:
        log.info("norm backend=%s kernel=%s: %s", choice.backend, choice.kernel, choice.reason)
    return choice
