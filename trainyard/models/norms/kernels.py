"""Normalisation kernels of other packages, applied to our parameters, behind one signature.

s sequence, b batch, c channels; n heads where each is normalised by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

NormBackend = Literal["torch", "apex", "transformer_engine"]

HALVES_AND_SINGLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class NormChoice:
    """A backend, its kernel, and why."""

    backend: NormBackend
    kernel: str
    """layer_norm, rms_norm; fused_layer_norm, fused_rms_norm, fast_layer_norm (apex); LayerNorm,
    RMSNorm (Transformer Engine)."""
    reason: str


class NormKernel(Protocol):
    """LayerNorm where there is a bias, RMSNorm where there is none."""

    def takes(self, x: Tensor, weight: Tensor) -> bool:
        """Whether the kernel supports these tensors; if not, torch computes."""

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
    ) -> Tensor:
        """x: (..., c), weight and bias: (c); centred: weight is its distance from 1. Returns (...,
        c) in the type of the weight. Differentiable in all three."""


class ApexNorm:
    """apex's fused kernels; `fast`: those of apex.contrib, for LayerNorm of certain widths."""

    def __init__(self, fast: bool = False) -> None:
        self._fast = fast

    def takes(self, x: Tensor, weight: Tensor) -> bool:
        """Anything on a CUDA device; the persistent kernel needs one dtype for all."""
        return x.is_cuda and (not self._fast or x.dtype == weight.dtype)

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
    ) -> Tensor:
        """See `NormKernel`."""
        if centred:
            weight = weight + 1
        if self._fast:
            fast: Tensor = _apex_fast()(x, weight, bias, eps)
            return fast
        functions = _apex_functions()
        mixed = x.dtype != weight.dtype  # these return the type of the weight, the others that of x
        if bias is None:
            rms = "mixed_dtype_fused_rms_norm_affine" if mixed else "fused_rms_norm_affine"
            out: Tensor = functions[rms](x, weight, weight.shape, eps)
            return out
        name = "mixed_dtype_fused_layer_norm_affine" if mixed else "fused_layer_norm_affine"
        out = functions[name](x, weight, bias, weight.shape, eps)
        return out


class TransformerEngineNorm:
    """Transformer Engine's module, given the parameters of ours.

    Its backward pass reads the weight from the module, not from the arguments of forward, so the
    module holds our parameter itself. One instance serves one normalisation."""

    def __init__(self) -> None:
        self._module: Any = None

    def takes(self, x: Tensor, weight: Tensor) -> bool:
        """Parameters (not plain tensors) and inputs of one dtype."""
        fits = x.dtype == weight.dtype and x.dtype in HALVES_AND_SINGLE
        return x.is_cuda and fits and isinstance(weight, nn.Parameter)

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
    ) -> Tensor:
        """See `NormKernel`."""
        module = self._module
        if module is None or module.weight is not weight:
            module = self._module = _engine_module(weight, bias, eps, centred)
        out: Tensor = module(x)
        return out


def _engine_module(weight: Tensor, bias: Tensor | None, eps: float, centred: bool) -> Any:
    # Imported here: the package is optional, and takes seconds.
    from transformer_engine.pytorch import (  # type: ignore[import-not-found]
        LayerNorm,
        RMSNorm,
    )

    module = (RMSNorm if bias is None else LayerNorm)(
        weight.shape[0],
        eps=eps,
        params_dtype=weight.dtype,
        zero_centered_gamma=centred,
        device=weight.device,
    )
    module.weight = weight
    if bias is not None:
        module.bias = bias
    return module


@lru_cache(maxsize=1)
def _apex_functions() -> dict[str, Callable[..., Tensor]]:
    from apex.normalization.fused_layer_norm import (  # type: ignore[import-not-found]
        fused_layer_norm_affine,
        fused_rms_norm_affine,
        mixed_dtype_fused_layer_norm_affine,
        mixed_dtype_fused_rms_norm_affine,
    )

    functions: tuple[Any, ...] = (
        fused_layer_norm_affine,
        fused_rms_norm_affine,
        mixed_dtype_fused_layer_norm_affine,
        mixed_dtype_fused_rms_norm_affine,
    )
    return {function.__name__: function for function in functions}


@lru_cache(maxsize=1)
def _apex_fast() -> Callable[..., Tensor]:
    from apex.contrib.layer_norm.layer_norm import (  # type: ignore[import-not-found]
        FastLayerNormFN,
    )

    apply: Callable[..., Tensor] = FastLayerNormFN.apply
    return apply


class Uncompiled:
    """A kernel that torch.compile skips: a graph ends before it and the next begins after it."""

    def __init__(self, kernel: NormKernel) -> None:
        self._kernel = kernel
        self._apply: Callable[..., Tensor] = torch.compiler.disable(_apply)

    def takes(self, x: Tensor, weight: Tensor) -> bool:
        """See `NormKernel`."""
        return self._kernel.takes(x, weight)

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
    ) -> Tensor:
        """See `NormKernel`."""
        return self._apply(self._kernel, x, weight, bias, eps, centred)


def _apply(kernel: NormKernel, *arguments: Any) -> Tensor:
    return kernel(*arguments)


def build_norm_kernel(choice: NormChoice) -> NormKernel | None:
    """The kernel that was chosen, for one normalisation; None for torch's own."""
    if choice.backend == "torch":
        return None
    if choice.backend == "apex":
        return Uncompiled(ApexNorm(fast=choice.kernel == "fast_layer_norm"))
    return Uncompiled(TransformerEngineNorm())
