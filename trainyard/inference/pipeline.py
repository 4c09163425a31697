"""Generation over pipeline stages: hidden states from stage to stage, and what the last one knows
to all of them.

Every rank knows the tokens, so shapes need no negotiation. Ranks of one stage do the same in the
same order."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from trainyard.parallel.comm_errors import communicating
from trainyard.parallel.groups import ALONE, ProcessGroups


class StageChain:
    """This rank's neighbours in the pipeline; without one, every step is the identity."""

    def __init__(self, groups: ProcessGroups = ALONE) -> None:
        self._group = groups.pp
        self._rank, self._size = groups.pp_rank, groups.dims.pp

    @property
    def is_first(self) -> bool:
        """Whether this rank has the embedding."""
        return self._rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the output layer."""
        return self._rank == self._size - 1

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The tensor that the previous stage sends."""
        buffer = torch.empty(shape, dtype=dtype, device=device)
        with communicating("generation: receiving hidden states"):
            dist.recv(buffer, self._global(self._rank - 1), self._group)
        return buffer

    def send(self, tensor: Tensor) -> None:
        """Give a tensor to the next stage, if there is one."""
        if self.is_last:
            return
        with communicating("generation: sending hidden states"):
            dist.send(tensor.contiguous(), self._global(self._rank + 1), self._group)

    def from_last(
        self,
        tensor: Tensor | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """The last stage's tensor on every stage. tensor: None on the others."""
        if self._group is None:
            assert tensor is not None
            return tensor
        if tensor is None:
            tensor = torch.empty(shape, dtype=dtype, device=device)
        tensor = tensor.contiguous()
        with communicating("generation: sharing the last stage's output"):
            dist.broadcast(tensor, self._global(self._size - 1), self._group)
        return tensor

    def _global(self, rank: int) -> int:
        assert self._group is not None
        return dist.get_global_rank(self._group, rank)
