"""Turns the matrix products of a model's layers to 8 bits; embedding, attention scores and output
layer stay in 16."""

from __future__ import annotations

import importlib
import logging

import torch
from torch import nn

from trainyard.attention.select import Device, probe_device
from trainyard.errors import ConfigError
from trainyard.fp8.delayed import DelayedScaling
from trainyard.fp8.recipe import Fp8Recipe
from trainyard.models.block import TransformerBlock
from trainyard.models.moe.experts import ExpertLinear
from trainyard.models.norm import LayerNorm, RMSNorm
from trainyard.models.norms.own_backward import OwnBackward
from trainyard.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear

log = logging.getLogger(__name__)

LinearMap = ColumnParallelLinear | RowParallelLinear | ExpertLinear
"""What can be computed in 8 bits."""

CAPABILITY = (8, 9)
"""The first GPUs with 8-bit tensor cores: Ada, then Hopper."""
HOPPER = (9, 0)
"""Blockwise products need GPUs of this capability."""
FIRST_CUDA = (12, 9)
"""They need cuBLAS of this CUDA version or newer."""


def report_fp8(recipe: Fp8Recipe, device: torch.device, *, say: bool = True) -> None:
    """Raise ConfigError for a GPU that has no 8-bit products, or a backend that is not here; say:
    log how they are made."""
    check_backend(recipe, probe_device(device.type))
    how = "emulated: cast to 8 bits, multiplied in fp32"
    if device.type == "cuda":
        check_device(recipe, torch.cuda.get_device_capability(device), torch.version.cuda)
        how = "tensor cores"
        if recipe.backend == "transformer_engine":
            _load_engine()
            how += " by its casts and products, asked for with --fp8-backend"
    if say:
        log.info(
            "fp8 format=%s recipe=%s backend=%s: %s",
            *(recipe.format, recipe.scaling, recipe.backend, how),
        )


def _load_engine() -> None:
    """Before anything runs on the GPU: where the system has a cuDNN beside torch's, it loads that,
    which fails once torch has loaded the parts of its own."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"--fp8-backend transformer_engine: Transformer Engine does not load: {error}. Name "
            "the cuDNN of this torch in CUDNN_HOME (the folder nvidia/cudnn beside torch), or give "
            "--fp8-backend torch"
        ) from error


def check_backend(recipe: Fp8Recipe, device: Device) -> None:
    """Raise ConfigError if the kernels that were asked for are not here."""
    if recipe.backend == "torch" or device.transformer_engine:
        return
    problem = "is not installed"
    if device.type != "cuda":
        problem = f"needs a CUDA device, not {device.type}"
    raise ConfigError(
        f"--fp8-backend transformer_engine is not available here: Transformer Engine {problem}. "
        "Leave it out, or give torch, which always works"
    )


def check_device(recipe: Fp8Recipe, capability: tuple[int, int], cuda: str | None) -> None:
    """Raise ConfigError for a GPU, or a torch for a CUDA, without these products."""
    found = f"{capability[0]}.{capability[1]}"
    if capability < CAPABILITY:
        raise ConfigError(
            f"--fp8-format {recipe.format} needs a GPU of compute capability 8.9 or more (Ada, "
            f"Hopper), and this one has {found}; leave it out"
        )
    version = tuple(int(part) for part in (cuda or "0.0").split(".")[:2])
    if recipe.scaling == "blockwise" and (capability != HOPPER or version < FIRST_CUDA):
        raise ConfigError(
            "--fp8-recipe blockwise needs a Hopper GPU (compute capability 9.0) and a torch for "
            f"CUDA 12.9 or newer; found {found} and CUDA {cuda}; give tensorwise"
        )


def use_fp8(model: nn.Module, recipe: Fp8Recipe, first: int = 0, last: int = 0) -> None:
    """Compute the linear maps of the layers of `model` in 8 bits, but for those of the `first` and
    `last` layers of each block, counted over the whole model."""
    for block in model.modules():
        if not isinstance(block, TransformerBlock):
            continue
        for number, layer in zip(block.numbers, block.layers.values(), strict=True):
            if first <= number < block.total - last:
                for module in layer.modules():
                    if isinstance(module, LinearMap):
                        _use_in(module, recipe)
                    elif isinstance(module, LayerNorm | RMSNorm):
                        _leave_to_compiler(module)


def _leave_to_compiler(norm: LayerNorm | RMSNorm) -> None:
    """It fuses the maxima of the casts to 8 bits with the norm's gradient."""
    if isinstance(norm.kernel, OwnBackward):
        norm.kernel = None


def _use_in(module: LinearMap, recipe: Fp8Recipe) -> None:
    module.fp8 = recipe
    if recipe.scaling == "delayed":
        num_maps = module.num_experts if isinstance(module, ExpertLinear) else 1
        module.delayed = DelayedScaling(recipe, module.weight.device, num_maps)


def fp8_weights(model: nn.Module) -> set[str]:
    """Names of the weights that `use_fp8` has products cast."""
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, LinearMap) and module.fp8 is not None
    }


def delayed_scalings(model: nn.Module) -> dict[str, DelayedScaling]:
    """The scales of linear maps that come from past steps, by the names of the modules."""
    return {
        name: module.delayed
        for name, module in model.named_modules()
        if isinstance(module, LinearMap) and module.delayed is not None
    }
