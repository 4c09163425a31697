"""LayerNorm and RMSNorm over the last dimension, computed by torch or by a kernel of another
package (`--norm-backend`), with the same parameters.

Outputs have the dtype of the weights, so that an fp32 residual stream enters the matrices in their
precision. Statistics are in fp32."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainyard.models.config import TransformerConfig
from trainyard.models.norms.kernels import NormKernel
from trainyard.models.norms.select import norm_kernel
from trainyard.parallel.model import ALONE, ModelParallel
from trainyard.parallel.sharding import mark_partial_grad


class LayerNorm(nn.Module):
    """Mean and variance over the last dimension, then scale and shift (arXiv:1607.06450)."""

    def __init__(
        self, size: int, eps: float, *, centred: bool = False, kernel: NormKernel | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.centred = centred
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., size), fp32 or of the weights' dtype. Returns (..., size) in the latter."""
        if self.kernel is not None and self.kernel.takes(x, self.weight):
            return self.kernel(x, self.weight, self.bias, self.eps, self.centred)
        weight, bias = _scale(self.weight, self.centred, x), self.bias.to(x.dtype)
        out = functional.layer_norm(x, self.weight.shape, weight, bias, self.eps)
        return out.to(self.weight.dtype)


class RMSNorm(nn.Module):
    """Root mean square over the last dimension, then scale (arXiv:1910.07467)."""

    def __init__(
        self, size: int, eps: float, *, centred: bool = False, kernel: NormKernel | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.centred = centred
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., size), fp32 or of the weights' dtype. Returns (..., size) in the latter."""
        if self.kernel is not None and self.kernel.takes(x, self.weight):
            return self.kernel(x, self.weight, None, self.eps, self.centred)
        weight = _scale(self.weight, self.centred, x)
        out = functional.rms_norm(x, self.weight.shape, weight, self.eps)
        return out.to(self.weight.dtype)


class L2Norm(nn.Module):
    """Division by the root mean square over the last dimension, without weights."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., size). Returns the same shape and dtype."""
        return functional.rms_norm(x, x.shape[-1:], None, self.eps)


NORMS: dict[str, type[LayerNorm | RMSNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def build_norm(
    config: TransformerConfig,
    parallel: ModelParallel = ALONE,
    *,
    size: int | None = None,
    of_head: bool = False,
) -> LayerNorm | RMSNorm:
    """The normalisation that `--normalization` names, over the residual stream, or over `size`
    channels. of_head: over the channels of a head.

    Under sequence parallelism a rank sees its part of the sequence, and always its own heads only,
    so its gradient is then a partial sum."""
    width = size or config.hidden_size
    norm = NORMS[config.normalization](
        width,
        config.norm_epsilon,
        centred=config.apply_layernorm_1p,
        kernel=norm_kernel(config, width),
    )
    if parallel.sequence_parallel or (of_head and parallel.tp_size > 1):
        for parameter in norm.parameters():
            mark_partial_grad(parameter)
    return norm


def _scale(weight: Tensor, centred: bool, x: Tensor) -> Tensor:
    """The factor of each channel in x's dtype; a centred weight is its distance from 1."""
    weight = weight.to(x.dtype)
    return weight + 1 if centred else weight
