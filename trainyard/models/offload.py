"""Offloading: activations of some layers stay in host memory until the backward pass.

On CUDA they are copied to pinned memory on a separate stream during the forward pass. The backward
pass of a layer prefetches those of the previous layer. The bits do not change. Parameters, and
tensors too small to be worth a copy, stay on the device."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

SMALLEST_BYTES = 1 << 16


class Kept:
    """A saved tensor on the host, possibly being fetched."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream | None) -> None:
        self.device = tensor.device
        self.strides = tensor.stride()
        self.stream = stream
        self.fetched: Tensor | None = None
        self.copied: torch.cuda.Event | None = None
        if stream is None:
            self.host = tensor.detach().clone()
            return
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)  # keeps its memory until the copy is done

    def fetch(self) -> None:
        """Start to copy it back."""
        if self.fetched is not None:
            return
        if self.stream is None:
            self.fetched = self.host
            return
        with torch.cuda.stream(self.stream):
            # With its original strides, which compiled code relies on.
            self.fetched = torch.empty_strided(
                self.host.shape, self.strides, dtype=self.host.dtype, device=self.device
            )
            self.fetched.copy_(self.host, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record(self.stream)

    def take(self) -> Tensor:
        """The tensor as it was saved, on its device."""
        self.fetch()
        tensor = self.fetched
        assert tensor is not None
        if self.copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self.copied)
            tensor.record_stream(current)
        self.fetched = None
        return tensor


class LayerStore:
    """The saved tensors of one layer in one forward pass."""

    def __init__(
        self, before: LayerStore | None, stream: torch.cuda.Stream | None, staying: frozenset[int]
    ) -> None:
        self._before, self._stream, self._staying = before, stream, staying
        self._kept: list[Kept] = []

    def pack(self, tensor: Tensor) -> Tensor | Kept:
        """Called by autograd for every tensor that the layer saves."""
        small = tensor.numel() * tensor.element_size() < SMALLEST_BYTES
        if small or _storage(tensor) in self._staying or _overlaps(tensor):
            return tensor
        kept = Kept(tensor, self._stream)
        self._kept.append(kept)
        return kept

    def unpack(self, kept: Tensor | Kept) -> Tensor:
        """Called by autograd where the backward pass needs it."""
        if isinstance(kept, Tensor):
            return kept
        before, self._before = self._before, None
        if before is not None:  # first use of this layer: prefetch the previous one
            for other in before._kept:
                other.fetch()
        return kept.take()


class ActivationOffload:
    """Saved-tensor hooks around the offloaded layers of one forward pass."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _copy_stream(device) if device.type == "cuda" else None
        self._last: LayerStore | None = None

    def around_layer(
        self, layer: nn.Module, shared: Iterable[Tensor]
    ) -> AbstractContextManager[Any]:
        """Hooks for the forward pass of `layer`. shared: tensors that other layers save as well."""
        staying = frozenset(_storage(tensor) for tensor in (*layer.parameters(), *shared))
        store = LayerStore(self._last, self._stream, staying)
        self._last = store
        return saved_tensors_hooks(store.pack, store.unpack)


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory, as in an expanded tensor."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in pairs)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device and process."""
    return torch.cuda.Stream(device)
