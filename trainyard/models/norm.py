"""LayerNorm and RMSNorm over the last dimension, computed by torch or by a kernel of another
package (`--norm-backend`), with the same parameters; torch's with a backward pass of ours on GPUs.

Outputs have the dtype of the weights, so that an fp32 residual stream enters the matrices in their
precision. Statistics are in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainyard.models.config import TransformerConfig
from trainyard.models.norms.kernels import NormKernel
from trainyard.models.norms.own_backward import OwnBackward, in_dtype_of, plain_norm
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

    def forward(self, x: Tensor, *, forked: bool = False) -> Any:
        """x: (..., size), fp32 or of the weights' dtype. Returns (..., size) in the latter; forked:
        both, for `forked`."""
        return _normalised(self, x, self.bias, forked)


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

    def forward(self, x: Tensor, *, forked: bool = False) -> Any:
        """x: (..., size), fp32 or of the weights' dtype. Returns (..., size) in the latter; forked:
        both, for `forked`."""
        return _normalised(self, x, None, forked)


def _normalised(
    norm: LayerNorm | RMSNorm, x: Tensor, bias: Tensor | None, forked: bool
) -> Tensor | tuple[Tensor, Tensor]:
    kernel, weight = norm.kernel, norm.weight
    if forked:
        assert isinstance(kernel, OwnBackward)
        return kernel.forked(x, weight, bias, norm.eps, norm.centred)
    if kernel is not None and kernel.takes(x, weight):
        return kernel(x, weight, bias, norm.eps, norm.centred)
    gain, shift = in_dtype_of(x, weight, bias, norm.centred)
    return plain_norm(x, gain, shift, norm.eps).to(weight.dtype)


def forked(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """x, with which the residual stream goes on, and norm(x). The kernel of our backward pass then
    adds the gradients of both."""
    if _forks(norm, x):  # through the module, whose hooks may wait for its parameters
        both: tuple[Tensor, Tensor] = norm(x, forked=True)
        return both
    return x, norm(x)


def _forks(norm: nn.Module, x: Tensor) -> bool:
    if not isinstance(norm, LayerNorm | RMSNorm):
        return False
    return isinstance(norm.kernel, OwnBackward) and norm.kernel.takes(x, norm.weight)


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
