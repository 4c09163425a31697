"""Muon: gradient descent with momentum, each step of a matrix orthogonalised (K. Jordan et al.,
2024; arXiv:2502.16982).

Momentum is number by number, so that data-parallel ranks may share it out in pieces that begin and
end anywhere, as any optimizer's state. Orthogonalising needs whole matrices: the ranks gather the
momentum, and each does the matrices that its piece touches. Matrices that tensor parallelism cuts
are gathered too, or orthogonalised where they are (--muon-tp-mode)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trainyard.optim.config import OptimizerConfig
from trainyard.optim.newton_schulz import orthogonalize, update_scale
from trainyard.optim.rules import unscale
from trainyard.optim.update import UpdateTerms
from trainyard.parallel.comm_errors import communicating
from trainyard.parallel.model import group_size
from trainyard.parallel.sharding import Cut, interleaved_rows, is_expert, shard_of


class MatrixGroups(Protocol):
    """Process groups of ranks that share matrices; None for one rank."""

    @property
    def tp(self) -> ProcessGroup | None:
        """Ranks that share each matrix."""

    @property
    def expert_tp(self) -> ProcessGroup | None:
        """Ranks that share each matrix of an expert."""


class Muon:
    """The update of hidden matrices. A step is `accumulate`, then `apply` with whole matrices."""

    moment = "momentum_buffer"
    """Name of its state tensor."""

    def __init__(self, config: OptimizerConfig, groups: MatrixGroups) -> None:
        self._config, self._groups = config, groups

    def accumulate(self, grads: list[Tensor], momenta: list[Tensor], terms: UpdateTerms) -> None:
        """Take gradients into the momenta, and overwrite them with what is to be orthogonalised."""
        decay = self._config.muon_momentum
        unscale(grads, terms.grad_scale)
        torch._foreach_lerp_(momenta, grads, 1.0 - decay)
        if self._config.muon_use_nesterov:
            torch._foreach_lerp_(grads, momenta, decay)
        else:
            torch._foreach_copy_(grads, momenta)

    def apply(
        self, main: Tensor, start: int, parameter: Tensor, matrix: Tensor, terms: UpdateTerms
    ) -> None:
        """Update the numbers of a parameter from `start` on. matrix: what `accumulate` left for all
        of this rank's part of the parameter, in its shape."""
        step = self.direction(parameter, matrix).reshape(-1)
        own = step[start : start + main.numel()].view_as(main)
        main.mul_(1.0 - terms.learning_rate * terms.weight_decay)
        main.add_(own.to(main.dtype), alpha=-terms.learning_rate)

    def direction(self, parameter: Tensor, matrix: Tensor) -> Tensor:
        """The orthogonalised, scaled update of this rank's part of a parameter; fp32. All ranks of
        its tensor-parallel group call it together.

        parameter: for how it is cut and what it is made of. matrix: like it."""
        rows = interleaved_rows(parameter) if self._config.muon_split_qkv else None
        group = self._groups.expert_tp if is_expert(parameter) else self._groups.tp
        cut = _cut_of_matrix(parameter)
        mode = self._config.muon_tp_mode
        if group is None or cut is None or mode == "blockwise":
            return self._whole(matrix, rows)
        if mode == "distributed":
            return self._in_place(matrix, rows, cut.dim - matrix.ndim, group)
        own = self._whole(_gather(matrix, cut, group), rows)
        return torch.cat([own.narrow(cut.dim, p.whole, p.length) for p in cut.pieces], cut.dim)

    def _whole(self, matrix: Tensor, rows: tuple[int, ...] | None) -> Tensor:
        return _joined([self._step(part) for part in _parted(matrix, rows)], rows)

    def _in_place(
        self, matrix: Tensor, rows: tuple[int, ...] | None, dim: int, group: ProcessGroup
    ) -> Tensor:
        """Of matrices whose dim -2 or -1 is cut over the group."""
        parts = _parted(matrix, rows)
        if dim == -2:
            return _joined([self._step(part.mT, group, by_rows=True).mT for part in parts], rows)
        return _joined([self._step(part, group) for part in parts], rows)

    def _step(
        self, x: Tensor, group: ProcessGroup | None = None, *, by_rows: bool = False
    ) -> Tensor:
        """x: (..., out, in), or transposed if it is cut by rows; its last dim is the one cut."""
        config = self._config
        num_out, num_in = x.shape[-2], x.shape[-1] * group_size(group)
        if by_rows:
            num_out, num_in = num_in, num_out
        scale = update_scale(num_out, num_in, config.muon_scale_mode)
        found = orthogonalize(
            x,
            config.muon_num_ns_steps,
            config.muon_coefficient_type,
            config.muon_fp32_matmul_prec,
            group=group,
        )
        return found * (scale * config.muon_extra_scale_factor)


def _cut_of_matrix(parameter: Tensor) -> Cut | None:
    """How tensor parallelism cuts the rows or columns of a matrix."""
    shard = shard_of(parameter)
    cuts = () if shard is None else shard.cuts
    return next((cut for cut in cuts if cut.dim >= parameter.ndim - 2), None)


def _gather(matrix: Tensor, cut: Cut, group: ProcessGroup) -> Tensor:
    """The whole along the cut dim, in the order of one process."""
    shards = [torch.empty_like(matrix) for _ in range(group_size(group))]
    with communicating():
        dist.all_gather(shards, matrix.contiguous(), group=group)
    pieces = [
        shard.narrow(cut.dim, piece.local, piece.length) for piece in cut.pieces for shard in shards
    ]
    return torch.cat(pieces, cut.dim)


def _parted(matrix: Tensor, rows: tuple[int, ...] | None) -> list[Tensor]:
    """The matrices that alternate in one, (..., rows of it, in) each."""
    if rows is None:
        return [matrix]
    blocks = matrix.unflatten(-2, (-1, sum(rows)))
    return [part.flatten(-3, -2) for part in blocks.split(rows, dim=-2)]


def _joined(parts: Sequence[Tensor], rows: tuple[int, ...] | None) -> Tensor:
    """Undoes `_parted`."""
    if rows is None:
        return parts[0]
    blocks = [part.unflatten(-2, (-1, n)) for part, n in zip(parts, rows, strict=True)]
    return torch.cat(blocks, dim=-2).flatten(-3, -2)
