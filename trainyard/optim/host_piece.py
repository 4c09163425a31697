"""State in host memory, updated by the CPU (--optimizer-cpu-offload; arXiv:2101.06840).

Gradients come down and parameters go up while the CPU works on others, and while the GPU updates
what it keeps. On a CPU there is nothing to copy from, and the result is the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from trainyard.optim.owned_params import BucketPiece, Group, TraitsOf
from trainyard.optim.schedule import Rates
from trainyard.optim.update import UpdateRule, UpdateTerms
from trainyard.parallel.data.buffers import Bucket

PART = 1 << 22
"""Numbers that are updated while others are copied, unless one tensor has more."""


class HostPiece(BucketPiece):
    """A part of this rank's piece of a bucket whose state is in host memory. A step is
    `fetch_grads`, then `update`."""

    def __init__(
        self,
        bucket: Bucket,
        traits_of: TraitsOf,
        group: ProcessGroup | None,
        *,
        of_experts: bool,
        part: tuple[int, int],
    ) -> None:
        """part: as in BucketPiece."""
        super().__init__(bucket, traits_of, group, of_experts=of_experts, part=part)
        self.flat = None
        self._host_grads = _pinned(self._own_grads)
        self._host_params = _pinned(self._params) if self.keeps_main else self._main
        self._down, self._up = _Stream(self._params.device), _Stream(self._params.device)
        self._arrivals: list[torch.cuda.Event | None] = []

    def _new_main(self) -> Tensor:
        """In fp32 training too a copy of its own, which no checkpoint has."""
        return _pinned(self._params, self._params.dtype if not self.keeps_main else torch.float32)

    def adopt(self) -> None:
        """The model's parameters, in fp32."""
        self._main.copy_(self._params)

    def restored(self) -> None:
        """In fp32 training the weights themselves were loaded."""
        if self.keeps_main:
            self.publish()
        else:
            self.adopt()

    def fetch_grads(self) -> None:
        """Begin to copy the gradients, in the order in which `update` needs them."""
        self._down.follow()
        self._down.follow(self._up)  # the copies of the last step have left `_host_params`
        self._arrivals = []
        for _, members in self._parts():
            for begin, end in self._spans[members]:
                self._down.copy(self._host_grads[begin:end], self._own_grads[begin:end])
            self._arrivals.append(self._down.mark())

    def update(
        self, rule: UpdateRule, rates: Rates, num_updates: int, factor: float, scale: float
    ) -> None:
        """Update part by part, each sent to the device at once; what follows there waits for it."""
        multiplier, grad_scale = 1.0, scale / factor
        if not self.keeps_main:  # as without offloading: there gradients are scaled first
            multiplier, grad_scale = factor / scale, 1.0
        for (group, members), arrival in zip(self._parts(), self._arrivals, strict=True):
            if arrival is not None:
                arrival.synchronize()
            spans = self._spans[members]
            grads = [self._host_grads[begin:end].to(self._main.dtype) for begin, end in spans]
            if multiplier != 1.0:
                torch._foreach_mul_(grads, multiplier)
            terms = UpdateTerms(*group.multipliers.rates_of(rates), num_updates, grad_scale)
            own = slice(members.start - group.members.start, members.stop - group.members.start)
            moments = [held[own] for held in group.moments]
            rule.update(group.mains[own], grads, moments, terms)
            for begin, end in spans:
                if self.keeps_main:
                    self._host_params[begin:end].copy_(self._main[begin:end])
                self._up.copy(self._params[begin:end], self._host_params[begin:end])
        self._up.precede()

    def _parts(self) -> Iterator[tuple[Group, slice]]:
        """Runs of pieces of one group, by their places in `pieces`."""
        for group in self.groups:
            first, size = group.members.start, 0
            for place in range(group.members.start, group.members.stop):
                length = self.pieces[place].main.numel()
                if place > first and size + length > PART:
                    yield group, slice(first, place)
                    first, size = place, 0
                size += length
            yield group, slice(first, group.members.stop)


class _Stream:
    """A stream of copies beside the current one; on a CPU copies are made at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def follow(self, other: _Stream | None = None) -> None:
        """Copies from now on wait for what the current stream, or the other one, has to do."""
        if self._stream is not None:
            before = torch.cuda.current_stream() if other is None else other._stream
            assert before is not None
            self._stream.wait_stream(before)

    def precede(self) -> None:
        """What the current stream is given from now on waits for the copies."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begin a copy."""
        with self._entered():
            target.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event | None:
        """An event that the host can wait for: all copies up to here are done."""
        return None if self._stream is None else self._stream.record_event()

    def _entered(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _pinned(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Host memory with the numbers of a tensor, which a GPU reads and writes by itself."""
    out = torch.empty(like.shape, dtype=dtype or like.dtype, pin_memory=like.is_cuda)
    return out.copy_(like)
