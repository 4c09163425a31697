"""Copies the slices that a rank writes into host memory, during training.

From a GPU the copy runs on a separate stream, parallel to the next step's forward and backward
passes, which must not change saved tensors (so the model's buffers are not saved). Only an update
of the parameters waits for it, on the GPU. Host tensors are copied at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from trainyard.checkpoint.plan import Slice
from trainyard.errors import HostMemoryError, lack_of_memory

ALIGNMENT = 64
"""Each tensor of a snapshot starts at a multiple of this many bytes, which fits any type and makes
copies fast."""


class Snapshot:
    """The values at the time it was started."""

    def __init__(
        self, parts: Mapping[Slice, Tensor], copied: torch.cuda.Event | None, device: int = -1
    ) -> None:
        """copied: an event on GPU `device` when all values are in host memory; None: they are."""
        self._parts = parts
        self._copied = copied
        self._device = device
        self._stall: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def hold_update(self) -> None:
        """Make later work on the GPU, which may change the parameters, wait for the copy. The host
        does not wait."""
        if self._copied is None or self._stall is not None:
            return
        stream = torch.cuda.current_stream()
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(self._copied)
        after.record(stream)
        self._stall = before, after

    def parts(self) -> Mapping[Slice, Tensor]:
        """The values; waits for the copy. Callable from any thread."""
        if self._copied is not None:
            with torch.cuda.device(self._device):  # a new thread would use GPU 0
                self._copied.synchronize()
        return self._parts

    def stalled_seconds(self) -> float:
        """Seconds that an update waited; call it after the copy."""
        if self._stall is None:
            return 0.0
        before, after = self._stall
        with torch.cuda.device(self._device):
            after.synchronize()
            return float(before.elapsed_time(after)) / 1e3


class HostMemory:
    """Host memory for snapshots, reused for each; page-locked for copies from a GPU, which then run
    at the speed of the bus."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._unlock: Callable[[], object] | None = None
        self._stream: torch.cuda.Stream | None = None

    def copy(self, parts: Mapping[Slice, Tensor]) -> Snapshot:
        """The current values, valid until the next call. GPU tensors must be on the current GPU and
        stay allocated until they are copied."""
        offsets, _ = _offsets(parts)
        memory = self.reserve(parts)
        copies = {
            part: memory[start : start + part.size_bytes].view(parts[part].dtype).view(part.shape)
            for part, start in offsets.items()
        }
        on_device = any(tensor.is_cuda for tensor in parts.values())
        if not on_device:
            _copy(parts, copies)
            return Snapshot(copies, None)
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            _copy(parts, copies)
            copied.record()
        return Snapshot(copies, copied, torch.cuda.current_device())

    def reserve(self, parts: Mapping[Slice, Tensor]) -> Tensor:
        """Memory for a copy of these slices. Allocating it takes longer than the copy."""
        _, size_bytes = _offsets(parts)
        locked = any(tensor.is_cuda for tensor in parts.values())
        fits = self._memory is not None and self._memory.numel() >= size_bytes
        if self._memory is None or not fits or (locked and self._unlock is None):
            self.free()
            self._memory = _allocated(size_bytes)
            if locked and size_bytes:
                self._lock(self._memory)
        return self._memory

    def _lock(self, memory: Tensor) -> None:
        # Not pin_memory: its allocator rounds up to a power of two.
        address, size = memory.data_ptr(), memory.numel()
        failure = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
        if failure:
            # CUDA keeps the error for whoever asks next, which would be a kernel of the model.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")
            raise HostMemoryError(
                f"cannot lock {size / 1e9:.1f} GB of host memory for asynchronous saves (CUDA "
                f"error {failure}); with --no-async-save none is needed"
            )
        # Unlock with this object at the latest: the memory may be reused and locked again.
        unlock = weakref.finalize(self, _unlock, address)
        unlock.atexit = False  # the end of the process frees everything
        self._unlock = unlock

    def free(self) -> None:
        """Free the memory; no copy may be using it."""
        if self._unlock is not None:
            self._unlock()
        self._memory, self._unlock = None, None


def _allocated(size_bytes: int) -> Tensor:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        if lack_of_memory(error) is None:
            raise
        raise HostMemoryError(
            f"no {size_bytes / 1e9:.1f} GB of host memory for asynchronous saves; with "
            "--no-async-save none is needed"
        ) from error


def _unlock(address: int) -> None:
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))


@torch.no_grad()
def _copy(parts: Mapping[Slice, Tensor], copies: Mapping[Slice, Tensor]) -> None:
    for part, target in copies.items():
        target.copy_(parts[part], non_blocking=True)


def _offsets(parts: Iterable[Slice]) -> tuple[dict[Slice, int], int]:
    """The offset of each slice in a snapshot, and the bytes of all."""
    offsets: dict[Slice, int] = {}
    end = 0
    for part in parts:
        offsets[part] = end
        end += -(-part.size_bytes // ALIGNMENT) * ALIGNMENT
    return offsets, end
