"""Whose kernel updates the parameters, and why. Knows of packages only whether they are there.

torch's fused operator is what `auto` takes: it was part of the fastest whole steps measured."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from trainyard.errors import ConfigError
from trainyard.optim.config import OptimizerConfig

log = logging.getLogger(__name__)

MODULES = {"apex": "amp_C", "transformer_engine": "transformer_engine"}
"""What has to be there of each package."""
NAMES = {"apex": "apex", "transformer_engine": "Transformer Engine"}
KERNELS = {"adam": "fused_adamw", "sgd": "foreach"}
"""torch's."""


@dataclass(frozen=True, slots=True)
class OptimizerChoice:
    """A backend, its kernel, and why."""

    backend: Literal["torch", "apex", "transformer_engine"]
    kernel: str
    """fused_adamw, foreach (torch); multi_tensor_adam (the packages)."""
    reason: str


def is_installed(module: str) -> bool:
    """Whether a module could be imported, by its name alone."""
    return importlib.util.find_spec(module) is not None


def choose_optimizer(
    config: OptimizerConfig, device_type: str, installed: Callable[[str], bool] = is_installed
) -> OptimizerChoice:
    """The backend that was asked for, or torch; ConfigError says why it cannot be had.

    device_type: where the parameters are; installed: answers for the modules of `MODULES`."""
    request, kernel = config.optimizer_backend, KERNELS[config.optimizer]
    if request == "torch":
        return OptimizerChoice("torch", kernel, "asked for with --optimizer-backend torch")
    if request == "auto":
        reason = "as in the fastest steps measured"
        return OptimizerChoice(
            "torch", kernel, reason if device_type == "cuda" else f"the one for {device_type}"
        )
    problem = None
    if device_type != "cuda":
        problem = f"needs a CUDA device, not {device_type}"
    elif not installed(MODULES[request]):
        problem = "is not installed" + (" with its amp_C" if request == "apex" else "")
    if problem is not None:
        raise ConfigError(
            f"--optimizer-backend {request} cannot be had here: {NAMES[request]} {problem}. Use "
            "--optimizer-backend auto, or torch, which always works"
        )
    reason = f"asked for with --optimizer-backend {request}"
    return OptimizerChoice(request, "multi_tensor_adam", reason)


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
    return choice
