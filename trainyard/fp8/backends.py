"""Casts to 8 bits and their products by backend, all with the signatures of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trainyard.fp8 import te
from trainyard.fp8.blockwise import cast_blocks, cast_tiles
from trainyard.fp8.cast import Fp8Pair, cast_pair, cast_scaled
from trainyard.fp8.product import scaled_product
from trainyard.fp8.recipe import Backend

Cast = Callable[[Tensor, torch.dtype], Fp8Pair]


class Kernels(NamedTuple):
    """Of one backend."""

    cast_pair: Cast
    cast_scaled: Callable[[Tensor, Tensor, torch.dtype], Fp8Pair]
    cast_tiles: Cast
    cast_blocks: Cast
    scaled_product: Callable[..., Tensor]


KERNELS: dict[Backend, Kernels] = {
    "torch": Kernels(cast_pair, cast_scaled, cast_tiles, cast_blocks, scaled_product),
    "transformer_engine": Kernels(
        *(te.cast_pair, te.cast_scaled, te.cast_tiles, te.cast_blocks, te.scaled_product)
    ),
}
