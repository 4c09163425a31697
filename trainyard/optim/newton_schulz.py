"""Orthogonalises matrices by Newton-Schulz iterations, which need matrix products alone.

An odd polynomial of a matrix X = U S V^T acts on its singular values: a X + b X X^T X +
c (X X^T)^2 X = U (a S + b S^3 + c S^5) V^T. Iterated, it brings all of them near 1 and leaves U and
V as they are (K. Jordan et al., Muon, kellerjordan.github.io/posts/muon, 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from trainyard.parallel.data.data_parallel import all_reduce_sum

CoefficientType = Literal["quintic", "simple"]
ScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]
MatmulPrecision = Literal["low", "medium", "high"]

COEFFICIENTS: dict[CoefficientType, tuple[tuple[float, float, float], ...]] = {
    # F. Cesista, leloykun.github.io/ponder/muon-opt-coeffs, as in Megatron-LM
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "simple": ((3.4445, -4.7750, 2.0315),),  # Jordan's
}
"""(a, b, c) of each iteration; more iterations begin again."""

SMALLEST = 1e-7
"""Norms below count as this: a matrix of zeros stays one."""


def orthogonalize(
    matrices: Tensor,
    num_steps: int,
    kind: CoefficientType = "quintic",
    precision: MatmulPrecision = "medium",
    *,
    group: ProcessGroup | None = None,
) -> Tensor:
    """The nearest matrices with equal singular values, roughly, in fp32. matrices: (..., m, n).

    group: ranks that hold each some columns of the same matrices; all ranks call it together. The
    products of (m, m) are added up over them, so m is best the side that is not cut."""
    tall = group is None and matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).float()
    square = all_reduce_sum(x.square().sum((-2, -1), keepdim=True), group)
    x = x / square.sqrt().clamp(min=SMALLEST)
    table = COEFFICIENTS[kind]
    with _products(precision, x.is_cuda):
        for step in range(num_steps):
            a, b, c = table[step % len(table)]
            gram = all_reduce_sum(x @ x.mT, group)
            x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


def update_scale(num_out: int, num_in: int, mode: ScaleMode) -> float:
    """Factor of the orthogonalised update of an (out, in) matrix. spectral: its numbers are 1 in
    the root mean square, whatever the shape (arXiv:2502.16982, section 2.2)."""
    if mode == "spectral":
        return float(max(num_out, num_in) ** 0.5)
    ratio = num_out / num_in
    return float((ratio if mode == "unit_rms_norm" else max(1.0, ratio)) ** 0.5)


@contextmanager
def _products(precision: MatmulPrecision, on_gpu: bool) -> Iterator[None]:
    """torch's precision of products of fp32 numbers; on a CPU they stay what they are."""
    if not on_gpu:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "high" else "medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
