"""Gathers updated parameters from the ranks that own them (the distributed optimizer).

Each bucket of parameters is gathered in place, or decoded from what is sent of it in 8 bits. When
that is to overlap, it goes bucket by bucket in the order in which forward needs them, one ahead:
with a single hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1, which tensor parallelism wants)
collectives that are all enqueued at once would hold up the computation behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainyard.parallel.data.buffers import Bucket
from trainyard.parallel.data.fp8_codec import Fp8Codec

all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)


class ParameterGather:
    """Gathers all buckets after an update: at once, or as forward goes (`install`)."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: ProcessGroup,
        overlap: bool,
        codec: Fp8Codec | None = None,
    ) -> None:
        """codec: of the buckets that are sent in 8 bits."""
        self._buckets = list(reversed(buckets))  # forward needs first what backward ends with
        self._group = group
        self._overlap = overlap
        self._numbers = {bucket: number for number, bucket in enumerate(self._buckets)}
        self._is_installed = False
        self._num_started = len(buckets)
        self._num_done = len(buckets)
        self._works: dict[int, Any] = {}
        self._codec = codec
        self._messages: dict[int, Tensor] = {}
        self.is_rounded = False
        """Whether weights are what was decoded of 8 bits."""

    def install(self, model: nn.Module, units: Iterable[nn.Module] | None = None) -> None:
        """Have modules wait for their parameters before their forward pass.

        units: modules that wait, each for all parameters in it: layers as they are compiled, as a
        hook inside a compiled module would break its graph (compile `layer.forward`, before which
        the module's hooks run). Unset: every module with direct parameters. Each must be called
        itself. Parameters in no unit are waited for with the unit before them, in
        the order of the model. Where none is before them, or they are `model`'s own, nothing is
        sure to be called in time, as stages run without their model being called; then all
        parameters are fetched at once."""
        if not self._overlap:
            return
        waits = self._waits(model, units)
        if model in waits:
            return
        for unit, number in waits.items():
            self._wait_before(unit, number)
        self._is_installed = True

    def _waits(self, model: nn.Module, units: Iterable[nn.Module] | None) -> dict[nn.Module, int]:
        """The last bucket that each unit waits for; parameters without a unit are `model`'s."""
        numbers = {
            place.member.parameter: number
            for number, bucket in enumerate(self._buckets)
            for place in bucket.places
        }
        if units is None:
            units = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
        owners = {p: unit for unit in units for p in unit.parameters(recurse=unit is not model)}
        waits: dict[nn.Module, int] = {}
        owner = model
        for parameter in model.parameters():
            owner = owners.get(parameter, owner)
            if parameter in numbers:
                waits[owner] = max(waits.get(owner, 0), numbers[parameter])
        return waits

    def _wait_before(self, module: nn.Module, number: int) -> None:
        def wait(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            self._finish_to(number)

        module.register_forward_pre_hook(wait)

    def has(self, bucket: Bucket) -> bool:
        """Whether all of a bucket is up to date."""
        return self._numbers[bucket] < self._num_done

    def begin(self) -> None:
        """Start to fetch the pieces of other ranks, now that each has updated its own."""
        self._num_started = self._num_done = 0
        if self._codec is not None:
            self._codec.measure(self._buckets)
            self.is_rounded = True
        if self._overlap and self._is_installed:
            self._start_next()
        else:
            self.finish()

    def finish(self) -> None:
        """Fetch everything outstanding, before anything but a forward pass reads parameters.

        Messages in 8 bits take memory, so only one bucket is ahead of the one waited for."""
        last = len(self._buckets) - 1
        for number in range(self._num_done, last + 1):
            until = last if self._codec is None else min(number + 1, last)
            while self._num_started <= until:
                self._start_next()
            self._finish_to(number)

    def finish_exactly(self) -> None:
        """Fetch in the weights' own format what was sent in 8 bits; each rank has published its own
        piece once more."""
        for bucket in self._buckets if self.is_rounded else ():
            if bucket.is_sent_in_8_bits:
                all_gather_single(bucket.params, bucket.own_params, group=self._group)
        self.is_rounded = False

    def _finish_to(self, number: int) -> None:
        """Wait for the buckets up to this one, and begin the next."""
        while self._num_done <= number:
            if self._num_started == self._num_done:
                self._start_next()
            self._works.pop(self._num_done).wait()
            message = self._messages.pop(self._num_done, None)
            if self._codec is not None and message is not None:
                self._codec.decode(self._buckets[self._num_done], message)
            self._num_done += 1
            if self._num_started == self._num_done:
                self._start_next()

    def _start_next(self) -> None:
        if self._num_started == len(self._buckets):
            return
        bucket = self._buckets[self._num_started]
        whole, own = bucket.params, bucket.own_params
        if self._codec is not None and bucket.is_sent_in_8_bits:
            own = self._codec.encode(bucket)
            whole = torch.empty_like(bucket.params, dtype=torch.uint8)
            self._messages[self._num_started] = whole
        self._works[self._num_started] = all_gather_single(
            whole, own, group=self._group, async_op=True
        )
        self._num_started += 1
