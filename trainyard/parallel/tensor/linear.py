"""Linear maps whose matrix is cut over tensor-parallel ranks, or whole on each.

Parameters are left unfilled, marked with the part of the whole that they are (sharding.py);
models/init.py or a checkpoint fills them. On one rank alone each is `functional.linear` and nothing
else. `fp8` of a layer, set by models/fp8.py, computes its products in 8 bits; with `delayed`, by
the scales of past steps. `quantized`, set by models/quantized.py, is a weight of 8 bits that takes
the place of `weight` where nothing is trained.

s sequence, b batch, n tensor-parallel ranks; "in" and "out" are sizes of the whole matrix."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainyard.fp8.delayed import DelayedScaling
from trainyard.fp8.recipe import Fp8Recipe
from trainyard.fp8.weights import QuantizedWeight, quantized_linear
from trainyard.parallel.model import ModelParallel
from trainyard.parallel.sharding import Parts, even_shard, mark_partial_grad, mark_shard
from trainyard.parallel.tensor.fp8_linear import fp8_column_linear, fp8_linear
from trainyard.parallel.tensor.mappings import reduce_from_tp, reduce_scatter_to_sp
from trainyard.parallel.tensor.overlap import column_linear, row_linear


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b, the rows of W cut: rank r computes channels r of y (arXiv:1909.08053).

    weight: (out / n, in); bias: (out / n) or None. parts = 2: the whole is two matrices one above
    the other, each cut for itself (a gated MLP: rank r holds [gate_r; up_r]); or the rows of each,
    where they differ."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        parallel: ModelParallel,
        parts: Parts = 1,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.fp8: Fp8Recipe | None = None
        self.delayed: DelayedScaling | None = None
        self.quantized: QuantizedWeight | None = None
        size, rank = parallel.tp_size, parallel.tp_rank
        self.weight = nn.Parameter(torch.empty(out_features // size, in_features))
        self.bias = nn.Parameter(torch.empty(out_features // size)) if bias else None
        if parallel.tp is not None:
            mark_shard(self.weight, even_shard((out_features, in_features), 0, size, rank, parts))
            if self.bias is not None:
                mark_shard(self.bias, even_shard((out_features,), 0, size, rank, parts))

    def forward(self, x: Tensor, *, bias_grad: bool = True) -> Tensor:
        """x: (s, b, in), (s / n, b, in) under sequence parallelism. Returns (s, b, out / n).

        bias_grad: False where what follows gives the gradient of the bias."""
        bias = self.bias if bias_grad or self.bias is None else self.bias.detach()
        if self.quantized is not None:
            return quantized_linear(x, self.quantized, bias)
        if self.fp8 is not None:
            return fp8_column_linear(x, self.weight, bias, self.fp8, self.parallel, self.delayed)
        return column_linear(x, self.weight, bias, self.parallel)


class RowParallelLinear(nn.Module):
    """y = x W^T + b, the columns of W cut: the ranks' results are added up (arXiv:1909.08053).

    weight: (out, in / n); bias: (out), whole, added once after the sum, or None."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, parallel: ModelParallel
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.fp8: Fp8Recipe | None = None
        self.delayed: DelayedScaling | None = None
        self.quantized: QuantizedWeight | None = None
        size, rank = parallel.tp_size, parallel.tp_rank
        self.weight = nn.Parameter(torch.empty(out_features, in_features // size))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        if parallel.tp is not None:
            mark_shard(self.weight, even_shard((out_features, in_features), 1, size, rank))
            if self.bias is not None and parallel.sequence_parallel:
                mark_partial_grad(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: (s, b, in / n). Returns (s, b, out), (s / n, b, out) under sequence parallelism."""
        parallel = self.parallel
        if parallel.tp is None:
            return self._product(x, self.bias)
        if parallel.sequence_parallel and parallel.tp_comm_overlap:
            y = row_linear(x, self.weight, parallel)
        elif parallel.sequence_parallel:
            y = reduce_scatter_to_sp(self._product(x), parallel.tp)
        else:
            y = reduce_from_tp(self._product(x), parallel.tp)
        return y if self.bias is None else y + self.bias

    def _product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.quantized is not None:
            return quantized_linear(x, self.quantized, bias)
        if self.fp8 is not None:
            return fp8_linear(x, self.weight, bias, self.fp8, self.delayed)
        return functional.linear(x, self.weight, bias)


class WholeLinear(nn.Module):
    """y = x W^T, with a W that is whole on every tensor-parallel rank. weight: (out, in)."""

    def __init__(self, in_features: int, out_features: int, parallel: ModelParallel) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        if parallel.sequence_parallel:
            mark_partial_grad(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x: (s, b, in), its part of s under sequence parallelism. Returns (s, b, out)."""
        return functional.linear(x, self.weight)
