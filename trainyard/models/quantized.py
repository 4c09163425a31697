"""A model whose layers have weights of 8 bits, to generate from."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn

from trainyard.fp8.weights import Kind, quantize
from trainyard.models.latent_attention import LatentAttention
from trainyard.models.model import TransformerModel
from trainyard.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear


@torch.no_grad()
def quantize_layers(model: TransformerModel, kind: Kind) -> int:
    """Turn the matrices of all layers of this rank into 8 bits, one after another; return how many.

    Embedding, norms and experts stay, as does the matrix that makes keys and values of latents,
    which attention applies by parts. The output layer is turned too, if it is not the embedding."""
    kept = {
        id(module.linear_kv_up_proj)
        for module in model.modules()
        if isinstance(module, LatentAttention)
    }
    count = 0
    names = ("decoder", "output_layer")
    parts = [part for name, part in model.named_children() if name in names]
    for module in chain.from_iterable(part.modules() for part in parts):
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and id(module) not in kept:
            _quantize(module, kind)
            count += 1
    return count


def _quantize(module: nn.Module, kind: Kind) -> None:
    assert isinstance(module, ColumnParallelLinear | RowParallelLinear)
    module.quantized = quantize(module.weight, kind)
    module.register_parameter("weight", None)
