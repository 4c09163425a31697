"""Inputs of a layer besides the residual stream.

s sequence, b batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainyard.attention.masks import CAUSAL, FULL, AttentionMask
from trainyard.models.rope import Rotary
from trainyard.parallel.invariant_dropout import DropoutPlace

if TYPE_CHECKING:
    from trainyard.models.attention import KVCache

DROPOUT_SEED = "dropout_seed"
"""Key of a batch: () int64 on the model's device, different for every micro-batch of the run, equal
on all ranks that share it."""


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Positions, mask and cache of attention, shared by all layers of a forward pass."""

    rotary: Rotary | None = None
    mask: AttentionMask = CAUSAL
    kv_cache: KVCache | None = None
    bias: Tensor | None = None
    """(1, n, s, s) added to the scores of the heads of this rank."""
    source: Tensor | None = None
    """(t, b, h) keys and values of cross-attention, this rank's part under sequence
    parallelism."""
    source_mask: AttentionMask = FULL
    source_cache: dict[int, tuple[Tensor, Tensor]] | None = None
    """Keys and values of `source` by the number of the layer, (t, b, g, d) each: filled by the
    first pass of a generation, and read by those after it."""

    def tensors(self) -> list[Tensor]:
        """The shared tensors."""
        shared = [self.bias, self.source]
        for mask in (self.mask, self.source_mask):
            shared += [mask.dense, mask.bounds, mask.positions, mask.query_bounds]
        if self.rotary is not None:
            shared += [self.rotary.cos, self.rotary.sin]
        return [tensor for tensor in shared if tensor is not None]


_SPREAD = 0x9E3779B97F4A7C15 - 2**64
"""2^64 / golden ratio: seeds of neighbouring layers have no bits in common."""


class DropoutPlaces:
    """Seeds and positions of the dropouts of one forward pass.

    Each layer has its own seed tensor, so that its number is an input and not a constant for which
    torch.compile would compile the layer again."""

    def __init__(self, seed: Tensor, positions: Tensor, num_layers: int, first: int = 0) -> None:
        """seed: () int64, of the micro-batch. positions: (s) of this rank's tokens. first: number
        of the first seed, so that two blocks of layers have none in common."""
        numbers = torch.arange(first, first + num_layers + 1, device=seed.device)
        self._seeds = (seed + (numbers + 1) * _SPREAD).unbind()
        self._positions = positions

    def of_layer(self, number: int) -> DropoutPlace:
        """For a layer, by its number in the whole model."""
        return DropoutPlace(self._seeds[number], self._positions)

    def of_embedding(self) -> DropoutPlace:
        """Before the first layer."""
        return DropoutPlace(self._seeds[-1], self._positions)
