"""The MLP of a layer, and the table of its activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainyard.models.bias_grads import KINDS, activated, gives_bias_grads
from trainyard.models.config import TransformerConfig
from trainyard.models.swiglu import swiglu
from trainyard.parallel.model import ALONE, ModelParallel
from trainyard.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear


def gelu(x: Tensor) -> Tensor:
    """x Phi(x), exactly (arXiv:1606.08415)."""
    return functional.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in the tanh form of GPT-2, which fused bias and GELU kernels compute."""
    return functional.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x), an approximation of GELU (arXiv:1606.08415, section 4)."""
    return x * torch.sigmoid(1.702 * x)


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return functional.relu(x)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (Primer, arXiv:2109.08668)."""
    return functional.relu(x).square()


def quick_geglu(x: Tensor) -> Tensor:
    """quick_gelu(gate) x up of [gate; up]."""
    gate, up = x.chunk(2, dim=-1)
    return quick_gelu(gate) * up


def bounded_quick_geglu(x: Tensor, limit: float | None, offset: float) -> Tensor:
    """quick_gelu(gate) x (up + offset) of [gate; up], gate at most `limit` and up within +-`limit`
    (gpt-oss, arXiv:2508.10925)."""
    gate, up = x.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return quick_gelu(gate) * (up + offset)


def geglu_tanh(x: Tensor) -> Tensor:
    """gelu_tanh(gate) x up of [gate; up] (arXiv:2002.05202)."""
    gate, up = x.chunk(2, dim=-1)
    return gelu_tanh(gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": relu,
    "squared_relu": squared_relu,
    "swiglu": swiglu,
    "quick_geglu": quick_geglu,
    "geglu_tanh": geglu_tanh,
}


def activation_of(config: TransformerConfig) -> Callable[[Tensor], Tensor]:
    """What stands between the matrices of an MLP."""
    limit, offset = config.activation_func_clamp_value, config.glu_linear_offset
    if limit is not None or offset:
        return partial(bounded_quick_geglu, limit=limit, offset=offset)
    return ACTIVATIONS[config.activation]


class MLP(nn.Module):
    """linear_fc1, activation, linear_fc2; gated: the rows of linear_fc1 are [gate; up]."""

    def __init__(
        self,
        config: TransformerConfig,
        parallel: ModelParallel = ALONE,
        ffn_size: int | None = None,
    ) -> None:
        """ffn_size: width inside; unset: the model's."""
        super().__init__()
        h, parts = config.hidden_size, 2 if config.gated else 1
        ffn = ffn_size or config.ffn_size
        bias = config.linear_bias
        self.linear_fc1 = ColumnParallelLinear(
            h, parts * ffn, bias=bias, parallel=parallel, parts=parts
        )
        self.activation = activation_of(config)
        self.kind = config.activation
        self.linear_fc2 = RowParallelLinear(ffn, h, bias=bias, parallel=parallel)

    def forward(self, x: Tensor) -> Tensor:
        """x: (s, b, h), its part of s under sequence parallelism. Returns the same shape."""
        out: Tensor = self.linear_fc2(self._inside(x))
        return out

    def _inside(self, x: Tensor) -> Tensor:
        fc1 = self.linear_fc1
        # Casts to 8 bits are better left to the compiler, which does them with the activation.
        if (
            fc1.bias is None
            or fc1.fp8 is not None
            or self.kind not in KINDS
            or not gives_bias_grads(x)
        ):
            return self.activation(fc1(x))
        return activated(fc1(x, bias_grad=False), fc1.bias, self.kind)
