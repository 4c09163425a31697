"""Casts and products of 8 bits by Transformer Engine's kernels, with the signatures of ours.

Its quantizers are those of its recipes: `Float8CurrentScalingQuantizer` (tensorwise),
`Float8Quantizer` (delayed), `Float8BlockQuantizer` (blockwise). Scales lie in its tensors as in
ours, so everything around the products is the same: ranks, recomputation, checkpoints. Infinities
become the largest number there, so they do not reach the loss.

Written for release 2.20."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainyard.fp8.blockwise import is_of_blocks, new_parts
from trainyard.fp8.cast import Fp8Pair

# Its modules are imported where they are used: the package is optional, and takes seconds.


def cast_pair(x: Tensor, dtype: torch.dtype) -> Fp8Pair:
    """See `cast.cast_pair`."""
    return _whole_pair(x, None, dtype)


def cast_scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Fp8Pair:
    """See `cast.cast_scaled`."""
    return _whole_pair(x, scale, dtype)


def cast_tiles(x: Tensor, dtype: torch.dtype) -> Fp8Pair:
    """See `blockwise.cast_tiles`."""
    return Fp8Pair(*_parts_op(x, dtype, False))


def cast_blocks(x: Tensor, dtype: torch.dtype) -> Fp8Pair:
    """See `blockwise.cast_blocks`."""
    return Fp8Pair(*_parts_op(x, dtype, True))


def scaled_product(
    a: Tensor,
    b: Tensor,
    inverse_a: Tensor,
    inverse_b: Tensor,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """See `product.scaled_product`; both scales are of whole tensors or of parts."""
    out: Tensor = _product_op(a, b, inverse_a, inverse_b, dtype, bias, fast)
    return out


def _whole_pair(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Fp8Pair:
    rows, columns, inverse = _whole_op(x, scale, dtype)
    return Fp8Pair(rows, columns, inverse, inverse)


def _whole(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """scale: () fp32; None: from the maximum of x."""
    from transformer_engine.pytorch import (  # type: ignore[import-not-found]
        Float8CurrentScalingQuantizer,
        Float8Quantizer,
    )

    number, both = _number(dtype), {"rowwise": True, "columnwise": True}
    if scale is None:
        quantizer = Float8CurrentScalingQuantizer(number, x.device, **both)
    else:  # it also takes the maximum, which callers know
        quantizer = Float8Quantizer(scale.reshape(1), scale.new_zeros(1), number, **both)
    made = _quantized(quantizer, x)
    rows, columns = made._data.view(dtype), made._transpose
    # Newer GPUs than Hopper multiply without a transpose, so it makes none for them.
    columns = rows.t().contiguous() if columns is None else columns.view(dtype)
    return rows, columns, made._scale_inv.reshape(())


def _parts(x: Tensor, dtype: torch.dtype, blocks: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from transformer_engine.pytorch import Float8BlockQuantizer

    quantizer = Float8BlockQuantizer(
        _number(dtype),
        rowwise=True,
        columnwise=True,
        force_pow_2_scales=True,
        block_scaling_dim=2 if blocks else 1,
    )
    made = _quantized(quantizer, x)
    values = (made._rowwise_data.view(dtype), made._columnwise_data.view(dtype))
    return *values, made._rowwise_scale_inv, made._columnwise_scale_inv


def _quantized(quantizer: Any, x: Tensor) -> Any:
    quantizer.internal = True  # no tensor subclass around the numbers
    return quantizer(x.detach().contiguous())


def _product(
    a: Tensor,
    b: Tensor,
    inverse_a: Tensor,
    inverse_b: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None,
    fast: bool,
) -> Tensor:
    from transformer_engine.pytorch.cpp_extensions import (  # type: ignore[import-not-found]
        general_gemm,
    )

    # Its first operand is the weight: (n, k), then (m, k), each with k innermost, as ours.
    operands = _stored(b, inverse_b, dtype), _stored(a, inverse_a, dtype)
    out: Tensor = general_gemm(
        *operands, out_dtype=dtype, layout="TN", bias=bias, use_split_accumulator=not fast
    )[0]
    return out


def _stored(values: Tensor, inverse_scale: Tensor, dtype: torch.dtype) -> Any:
    """A matrix as its products take it."""
    from transformer_engine.pytorch.tensor.storage import (  # type: ignore[import-not-found]
        float8_blockwise_tensor_storage,
        float8_tensor_storage,
    )

    number, data = _number(values.dtype), values.view(torch.uint8)
    if inverse_scale.ndim == 0:
        return float8_tensor_storage.Float8TensorStorage(
            data=data, fp8_scale_inv=inverse_scale.reshape(1), fp8_dtype=number, fake_dtype=dtype
        )
    return float8_blockwise_tensor_storage.Float8BlockwiseQTensorStorage(
        rowwise_data=data,
        rowwise_scale_inv=inverse_scale,
        columnwise_data=None,
        columnwise_scale_inv=None,
        fp8_dtype=number,
        quantizer=None,
        is_2D_scaled=is_of_blocks(values, inverse_scale),
        fake_dtype=dtype,
    )


def _number(dtype: torch.dtype) -> Any:
    """What it calls a number format."""
    from transformer_engine.pytorch.constants import (  # type: ignore[import-not-found]
        TE_DType,
    )

    return TE_DType[dtype]


# --- one operation each for a compiler, which cannot trace a package's own -----------------------

_whole_op = torch.library.custom_op("trainyard::te_fp8_cast", _whole, mutates_args=())
_parts_op = torch.library.custom_op("trainyard::te_fp8_cast_parts", _parts, mutates_args=())
_product_op = torch.library.custom_op("trainyard::te_fp8_product", _product, mutates_args=())


@_whole_op.register_fake
def _(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    m, k = x.shape
    rows, columns = x.new_empty((m, k), dtype=dtype), x.new_empty((k, m), dtype=dtype)
    return rows, columns, x.new_empty((), dtype=torch.float32)


_parts_op.register_fake(new_parts)


@_product_op.register_fake
def _(
    a: Tensor,
    b: Tensor,
    inverse_a: Tensor,
    inverse_b: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None,
    fast: bool,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)
