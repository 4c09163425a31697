"""Keys and values of any number of sequences in blocks, of which a step computes the next tokens;
layers without them have states in slots.

The tokens of a step are one row: those of one sequence behind those of another. A latent, of which
the values are the first channels of the keys, is stored once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trainyard.attention.kept import as_bytes, kept_as
from trainyard.attention.paged import PagedLayout
from trainyard.attention.slot_states import SlotStates


class PagedKVCache:
    """The blocks of the layers of one rank, allocated once. Implements `models.attention.KVCache`
    but for `extend`: layers write and attend (`models.attention.CoreAttention.over_blocks`)."""

    layout: PagedLayout
    """Of the step that is computed."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        heads: tuple[tuple[int, int], tuple[int, int]],
        *,
        layers: Iterable[int],
        states: SlotStates | None = None,
        is_latent: bool = False,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        flash_version: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """heads: see `AttentionSizes.cached_heads`. layers: those with attention of this pipeline
        stage. states: of its other layers. kv_dtype: what keys and values are kept in, `dtype` or
        E4M3; unset: the former. flash_version: see `paged_attention`. One block more is made, for
        tokens that belong to no sequence."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self.flash_version = flash_version
        self.scratch = num_blocks
        """The block that no sequence has."""
        self.states = SlotStates({}) if states is None else states
        shape = (num_blocks + 1, block_size)
        (groups, width), (value_groups, value_width) = heads
        if is_latent:
            width += value_width
        self._dtype = kv_dtype or dtype
        # E4M3 as bytes: a compiled step that wrote to a view of them would copy all.
        held = torch.uint8 if self._dtype.itemsize == 1 else self._dtype
        # Zeros: what is behind a sequence is masked, and must not be NaN.
        self._keys = {
            layer: torch.zeros((*shape, groups, width), dtype=held, device=device)
            for layer in layers
        }
        if is_latent:
            self._values = {layer: keys[..., : heads[0][1]] for layer, keys in self._keys.items()}
        else:
            self._values = {
                layer: torch.zeros((*shape, value_groups, value_width), dtype=held, device=device)
                for layer in self._keys
            }

    def positions(self, num_new: int) -> Tensor:
        """(1, T) of the new tokens."""
        return self.layout.positions

    def mask(self, num_new: int) -> None:
        """None: the layout says where a token may look."""
        return None

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Not for blocks."""
        raise AssertionError("a layer writes to a paged cache and attends over its blocks")

    def write(self, layer: int, k: Tensor, v: Tensor | None) -> None:
        """Store keys (T, g, d) and values (T, g, d_v) of the new tokens; None: a latent has its
        values among its keys."""
        at = self.layout.blocks, self.layout.places
        self._keys[layer][at] = as_bytes(kept_as(self._dtype, k))
        if v is not None:
            self._values[layer][at] = as_bytes(kept_as(self._dtype, v))

    def clear(self, blocks: Tensor) -> None:
        """Forget what earlier sequences left in blocks, as flash-attn needs it: from generation 3
        on it may multiply what is behind a sequence by 0, and a NaN stays one."""
        for kept in self.tensors():
            kept.index_fill_(0, blocks, 0)

    def tensors(self) -> list[Tensor]:
        """Keys and values of all layers, those of 8 bits as bytes."""
        return [*self._keys.values(), *self._values.values()]

    def blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys (N, B, g, d) and values (N, B, g, d_v) of a layer."""
        keys, values = self._keys[layer], self._values[layer]
        if keys.dtype == self._dtype:
            return keys, values
        return keys.view(self._dtype), values.view(self._dtype)
