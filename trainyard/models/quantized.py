"""A model whose layers have weights of 8 bits, to generate from."""

from __future__ import annotations

import torch

from trainyard.fp8.weights import Kind, QuantizedWeight, quantize
from trainyard.models.latent_attention import LatentAttention
from trainyard.models.model import TransformerModel
from trainyard.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear


@torch.no_grad()
def quantize_layers(model: TransformerModel, kind: Kind) -> int:
    """Turn the matrices of all layers of this rank into 8 bits, one after another; return how many.

    Embedding, norms and experts stay, as does the matrix that makes keys and values of latents,
    which attention applies by parts. The output layer, if it is not the embedding, is turned where
    its product is of 8 bits: elsewhere each step would widen all of it."""
    kept = {
        id(module.linear_kv_up_proj)
        for module in model.modules()
        if isinstance(module, LatentAttention)
    }
    count = 0
    children = dict(model.named_children())
    for module in children["decoder"].modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and id(module) not in kept:
            _turn(module, quantize(module.weight, kind))
            count += 1
    output = children.get("output_layer")
    if isinstance(output, ColumnParallelLinear):
        quantized = quantize(output.weight, kind)
        if quantized.casts_inputs:
            _turn(output, quantized)
            count += 1
    return count


def _turn(module: ColumnParallelLinear | RowParallelLinear, quantized: QuantizedWeight) -> None:
    module.quantized = quantized
    module.register_parameter("weight", None)
