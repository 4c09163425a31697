"""Keys and values of a fixed batch of sequences, each row as long as its own sequence, and the
states of layers that keep those instead.

The tokens of a row have positions 0 .. length - 1. Entries behind them are padding of a ragged
batch: no token attends to them, and the next tokens overwrite them. Multi-latent attention keeps
what its keys and values are made from instead: the latent, and the part of the keys that all heads
share. b batch, g key and value heads of this rank, d head channels, T capacity."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal, Self

import torch
from torch import Tensor

from trainyard.attention.kept import as_bytes, kept_as
from trainyard.attention.masks import causal_mask
from trainyard.inference.layer_states import StaticStates, empty_states
from trainyard.models.config import TransformerConfig


class StaticKVCache:
    """A cache of `capacity` tokens for each row, allocated once. Implements
    `models.attention.KVCache`."""

    def __init__(
        self,
        config: TransformerConfig,
        batch_size: int,
        capacity: int,
        *,
        layers: range | None = None,
        tp_size: int = 1,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """layers: of this pipeline stage; unset: all of the model. tp_size: ranks that share the
        heads. Layers without attention have no keys and values. kv_dtype: what these are kept in,
        `dtype` or E4M3; unset: the former."""
        layers = range(config.num_layers) if layers is None else layers
        self.capacity = capacity
        """Tokens that a row has room for."""
        # A tensor for each layer: of a part of a larger one, a compiled step makes a copy.
        self._keys, self._values = (
            {
                layer: torch.zeros(
                    (batch_size, heads, capacity, channels), dtype=kv_dtype or dtype, device=device
                )
                for layer in layers
                if config.has_attention(layer)
            }
            for heads, channels in config.cached_heads(tp_size)
        )
        self.states = StaticStates(
            empty_states(
                config, batch_size, layers=layers, tp_size=tp_size, dtype=dtype, device=device
            )
        )
        self._lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._rows = torch.arange(batch_size, device=device).unsqueeze(1)
        self.lengths = [0] * batch_size
        """Cached tokens of each row."""
        self._new = [0] * batch_size

    @property
    def size_bytes(self) -> int:
        """Memory of all keys, values and states."""
        kept = (*self._keys.values(), *self._values.values())
        return sum(x.numel() * x.element_size() for x in kept) + self.states.size_bytes

    def positions(self, num_new: int) -> Tensor:
        """(b, s) positions of the next `num_new` tokens of each row."""
        return self._lengths.unsqueeze(1) + torch.arange(num_new, device=self._lengths.device)

    def mask(self, num_new: int) -> Tensor | None:
        """(b, 1, s, t) True where a new token may attend; None where the last tokens of all rows
        are beside each other, and causality is the only rule."""
        is_even = min(self.lengths) == max(self.lengths)
        if is_even and (num_new == 1 or not self.lengths[0]):
            return None
        return causal_mask(self.positions(num_new), max(self.lengths) + num_new)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v, (b, g, s, d), to each row; return (b, g, t, d) of both."""
        keys, values = self._keys[layer], self._values[layer]
        num_new = k.shape[2]
        seen = max(self.lengths) + num_new
        assert seen <= self.capacity, f"{seen} tokens in a cache of {self.capacity}"
        is_even = min(self.lengths) == max(self.lengths)
        for kept, new in ((keys, k), (values, v)):
            if is_even:
                kept[:, :, seen - num_new : seen] = kept_as(kept.dtype, new)
            else:
                self._write(kept, new, self.positions(num_new))
        return keys[:, :, :seen].to(k.dtype), values[:, :, :seen].to(v.dtype)

    def _write(self, kept: Tensor, new: Tensor, places: Tensor) -> None:
        """new: (b, g, s, d), to `places`, (b, s), of each row."""
        own = kept_as(kept.dtype, new).transpose(1, 2)
        as_bytes(kept)[self._rows, :, places] = as_bytes(own)

    def begin(self, counts: Sequence[int]) -> None:
        """Say before a pass that `counts[row]` of its tokens count, and the rest are padding."""
        self._new = list(counts)
        is_even = min(counts) == max(counts)
        self.states.counts = None if is_even else torch.tensor(counts, device=self._lengths.device)

    def advance(self) -> None:
        """Count the tokens of the pass that `begin` announced as cached."""
        self.lengths = [old + new for old, new in zip(self.lengths, self._new, strict=True)]
        self._lengths += torch.tensor(self._new, device=self._lengths.device)
        self.states.counts = None

    def clear(self) -> None:
        """Forget all tokens, for a next batch."""
        self.lengths = [0] * len(self.lengths)
        self._lengths.zero_()
        self.states.clear()

    def of_rows(self, rows: slice) -> Self:
        """These rows alone, in the same memory, for a pass over them; its `lengths` are its own."""
        part = copy.copy(self)
        part._keys, part._values = (
            {layer: kept[rows] for layer, kept in held.items()}
            for held in (self._keys, self._values)
        )
        part.states = self.states.of_rows(rows)
        part._lengths, part.lengths = self._lengths[rows], self.lengths[rows]
        part._rows = self._rows[: len(part.lengths)]
        return part

    def reorder(self, rows: Sequence[int]) -> None:
        """Row i becomes a copy of row `rows[i]`, as beams of a search do."""
        order = torch.tensor(rows, device=self._lengths.device)
        self._keys, self._values = (
            {layer: as_bytes(x).index_select(0, order).view(x.dtype) for layer, x in held.items()}
            for held in (self._keys, self._values)
        )
        self.states.reorder(order)
        self._lengths, self._rows = self._lengths[order], self._rows[: len(rows)]
        self.lengths = [self.lengths[row] for row in rows]


class FixedShapeCache(StaticKVCache):
    """For steps of one token whose shapes never change, as CUDA graphs and compilers want them: all
    of the capacity is looked at, and what is behind a row's length is masked.

    While `is_fixed`, lengths are those on the device, and the step itself moves them on."""

    is_fixed = False

    def mask(self, num_new: int) -> Tensor | None:
        """(b, 1, s, capacity), of the lengths on the device."""
        if not self.is_fixed:
            return super().mask(num_new)
        return causal_mask(self.positions(num_new), self.capacity)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v, (b, g, 1, d); return all of both, (b, g, capacity, d)."""
        if not self.is_fixed:
            return super().extend(layer, k, v)
        keys, values = self._keys[layer], self._values[layer]
        places = self._lengths.unsqueeze(1)
        self._write(keys, k, places)
        self._write(values, v, places)
        return keys.to(k.dtype), values.to(v.dtype)

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """(b, g, T, d) keys and values, all of the room."""
        return self._keys[layer], self._values[layer]

    def copies(self) -> list[Tensor]:
        """Of what a step changes and does not write over, for `put_back`: the lengths on the
        device, and the states."""
        return [self._lengths.clone(), *self.states.copies()]

    def put_back(self, copies: Sequence[Tensor]) -> None:
        """Make these what they were."""
        lengths, *states = copies
        self._lengths.copy_(lengths)
        self.states.put_back(states)

    def move_on(self) -> None:
        """Count a token of every row as cached, on the device alone."""
        self._lengths += 1

    def count_step(self) -> None:
        """The same for the lengths that the host knows."""
        self.lengths = [length + 1 for length in self.lengths]


def kv_dtype_of(option: Literal["fp8"] | None) -> torch.dtype | None:
    """What --kv-cache-dtype names; None: the type of the model."""
    return torch.float8_e4m3fn if option == "fp8" else None
