"""A copy in host memory of what a rank is to write, made while training goes on.

From a GPU the copy runs on a stream of its own, beside the next step's forward and backward passes,
which must change nothing of what is saved (so no buffers of the model): only an update of the
parameters has to wait for it, on the GPU. Tensors of the host are copied at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from trainyard.checkpoint.plan import Slice
from trainyard.errors import HostMemoryError

ALIGNMENT = 64
"""Bytes at a multiple of which each tensor of a snapshot begins: any type may, and copies are
fast."""


class Snapshot:
    """The values as they were when it was begun."""

    def __init__(
        self, parts: Mapping[Slice, Tensor], copied: torch.cuda.Event | None, device: int = -1
    ) -> None:
        """copied: comes on the GPU of this number when all values are in host memory; None: they
        are."""
        self._parts = parts
        self._copied = copied
        self._device = device
        self._stall: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def hold_update(self) -> None:
        """What the GPU is given from here on may change the parameters: it begins when the copy is
        over. The host does not wait."""
        if self._copied is None or self._stall is not None:
            return
        stream = torch.cuda.current_stream()
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(self._copied)
        after.record(stream)
        self._stall = before, after

    def parts(self) -> Mapping[Slice, Tensor]:
        """The values, when all of them are there; in any thread."""
        if self._copied is not None:
            with torch.cuda.device(self._device):  # a thread is on GPU 0, and would begin to use it
                self._copied.synchronize()
        return self._parts

    def stalled_seconds(self) -> float:
        """How long an update was held up. Asked when the copy is over: one that has not come by
        then is not."""
        if self._stall is None:
            return 0.0
        before, after = self._stall
        with torch.cuda.device(self._device):
            after.synchronize()
            return float(before.elapsed_time(after)) / 1e3


class HostMemory:
    """Host memory for snapshots, kept from one to the next; page-locked where it receives from a
    GPU, which is then a plain transfer at the speed of the bus."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._unlock: Callable[[], object] | None = None
        self._stream: torch.cuda.Stream | None = None

    def copy(self, parts: Mapping[Slice, Tensor]) -> Snapshot:
        """The values as they are now; valid until the next call. Tensors of a GPU, the current one,
        must stay until they are copied."""
        places, _ = _places(parts)
        memory = self.reserve(parts)
        copies = {
            part: memory[start : start + part.size_bytes].view(parts[part].dtype).view(part.shape)
            for part, start in places.items()
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
        """Memory for a copy of these. Making it takes longer than the copy."""
        _, size_bytes = _places(parts)
        locked = any(tensor.is_cuda for tensor in parts.values())
        fits = self._memory is not None and self._memory.numel() >= size_bytes
        if self._memory is None or not fits or (locked and self._unlock is None):
            self.free()
            self._memory = torch.empty(size_bytes, dtype=torch.uint8)
            if locked and size_bytes:
                self._lock(self._memory)
        return self._memory

    def _lock(self, memory: Tensor) -> None:
        # Not pin_memory: its allocator rounds up to a power of two.
        place, size = memory.data_ptr(), memory.numel()
        failure = int(torch.cuda.cudart().cudaHostRegister(place, size, 0))
        if failure:
            raise HostMemoryError(
                f"--async-save cannot lock {size / 1e9:.1f} GB of host memory (CUDA error {failure}"
                "): give the job more memory, or leave the option out"
            )
        # At the latest when this goes: the place may be given to others, who lock it again.
        unlock = weakref.finalize(self, _unlock, place)
        unlock.atexit = False  # the process gives back everything
        self._unlock = unlock

    def free(self) -> None:
        """Give the memory back; nothing may be reading it."""
        if self._unlock is not None:
            self._unlock()
        self._memory, self._unlock = None, None


def _unlock(place: int) -> None:
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(place)))


@torch.no_grad()
def _copy(parts: Mapping[Slice, Tensor], copies: Mapping[Slice, Tensor]) -> None:
    for part, target in copies.items():
        target.copy_(parts[part], non_blocking=True)


def _places(parts: Iterable[Slice]) -> tuple[dict[Slice, int], int]:
    """Where in a snapshot each begins, and the bytes of all."""
    places: dict[Slice, int] = {}
    end = 0
    for part in parts:
        places[part] = end
        end += -(-part.size_bytes // ALIGNMENT) * ALIGNMENT
    return places, end
