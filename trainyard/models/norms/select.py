"""The kernel of a normalisation: what it needs, what is installed, one line in the log."""

from __future__ import annotations

import logging
from functools import lru_cache

import torch

from trainyard.attention.choice import Device
from trainyard.models.attention_backend import probe_device
from trainyard.models.config import TransformerConfig
from trainyard.models.norms.choice import (
    NormChoice,
    NormNeeds,
    choose_norm,
    norm_problem,
)
from trainyard.models.norms.kernels import NormKernel, build_norm_kernel

log = logging.getLogger(__name__)


def norm_kernel(config: TransformerConfig, size: int) -> NormKernel | None:
    """The kernel for one normalisation of `size` channels; None: torch's own operators.

    A model that is only read may have been trained where there were other packages: what is not
    here is computed by torch. Training refuses it before it builds anything (`report_norm`)."""
    request = config.norm_backend
    if request == "auto" or request == "torch" or not torch.cuda.is_available():
        return None
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
    """What a normalisation of `size` channels, or of the residual stream, asks for."""
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
    """Whose kernel normalises the residual stream; ConfigError for what cannot be had. say: in the
    log too, with why."""
    needs = norm_needs(config, dtype, compiled=compiled)
    choice = choose_norm(config.norm_backend, probe_device(device.type), needs)
    if say:
        log.info("norm backend=%s kernel=%s: %s", choice.backend, choice.kernel, choice.reason)
    return choice
