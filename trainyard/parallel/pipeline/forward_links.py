"""Hidden states from stage to stage of a pipeline in a forward pass alone, of batches of any shape.

Training knows one shape, and overlaps what it sends both ways (p2p.py); here both sides know the
shape of each batch from the batch itself."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from trainyard.parallel.comm_errors import communicating
from trainyard.parallel.groups import ProcessGroups

T = TypeVar("T")


class ForwardLinks:
    """What one rank of a pipeline receives and sends; idle without a pipeline."""

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self._sending: tuple[Work, Tensor] | None = None

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The hidden states of the stage before."""
        pp = self._groups.pp
        assert pp is not None
        buffer = torch.empty(shape, dtype=dtype, device=device)
        with communicating("pipeline: receiving hidden states"):
            dist.recv(buffer, group=pp, group_src=self._groups.pp_rank - 1)
        return buffer

    def send(self, hidden: Tensor) -> None:
        """Begin to send to the next stage, after the batch before has arrived."""
        self.settle()
        hidden = hidden.contiguous()
        with communicating("pipeline: sending hidden states"):
            work = dist.isend(hidden, group=self._groups.pp, group_dst=self._groups.pp_rank + 1)
        assert work is not None
        self._sending = work, hidden

    def settle(self) -> None:
        """Wait until the last batch has been sent."""
        if self._sending is not None:
            with communicating("pipeline: sending hidden states"):
                self._sending[0].wait()
            self._sending = None

    def from_last_stage(self, value: T) -> T:
        """The value of the last stage, on all of them."""
        if self._groups.pp is None:
            return value
        box = [value]
        with communicating("pipeline: sharing scores"):
            source = self._groups.dims.pp - 1
            dist.broadcast_object_list(box, group_src=source, group=self._groups.pp)
        return box[0]
