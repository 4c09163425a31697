"""Fits a vocabulary that a checkpoint pads to another number of rows than this run.

Embedding and untied output layer are padded to a multiple that depends on the tensor-parallel size.
Padding rows belong to no token and affect nothing. Rows that the checkpoint has are loaded. Further
rows get initial weights, drawn whole and then sharded so that every layout has the same ones, and
zero moments. Rows beyond the vocabulary of this run are dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from trainyard.checkpoint.layout import LocalTensors, ShardedTensor, slices_held
from trainyard.models.config import TransformerConfig
from trainyard.models.init import draw_rows
from trainyard.models.tied import EMBEDDING

TABLES = (EMBEDDING, "output_layer.weight", "output_layer.bias")
"""Parameters with a row for each token."""

WEIGHTS = ("model", "optimizer.param")
"""Kinds of tensors that hold weights; others hold moments."""


@dataclass(frozen=True, slots=True)
class Repadding:
    """From `theirs` rows to `ours`."""

    theirs: int
    ours: int
    config: TransformerConfig
    seed: int
    dtype: torch.dtype
    """Number format of the run's weights; main parameters start from these values too."""

    def stored(self, targets: Mapping[str, LocalTensors]) -> dict[str, LocalTensors]:
        """The part of the targets that the checkpoint has."""
        return {name: self._stored(name, held) for name, held in targets.items()}

    def _stored(self, name: str, held: LocalTensors) -> LocalTensors:
        if _table(name) is None:
            return held
        kept = min(self.theirs, self.ours)
        parts = []
        for part in slices_held(name, held):
            if part.global_shape[0] != self.ours:
                return held  # another model: refused later
            count = min(max(kept - part.offset[0], 0), part.tensor.shape[0])
            if count:
                shape = (self.theirs, *part.global_shape[1:])
                rows = part.tensor.narrow(0, 0, count)
                parts.append(ShardedTensor(name, rows, shape, part.offset))
        return parts

    @torch.no_grad()
    def fill_rest(self, targets: Mapping[str, LocalTensors]) -> None:
        """Fill the rows of the targets that the checkpoint does not have."""
        if self.ours <= self.theirs:
            return
        for name, held in targets.items():
            table = _table(name)
            if table is None:
                continue
            for part in slices_held(name, held):
                self._fill(part, *table)

    def _fill(self, part: ShardedTensor, kind: str, parameter: str) -> None:
        """The rows of one box from `theirs` on."""
        end = part.offset[0] + part.tensor.shape[0]
        begin = max(self.theirs, part.offset[0])
        if begin >= end:
            return
        target = part.tensor.narrow(0, begin - part.offset[0], end - begin)
        if kind not in WEIGHTS or parameter.endswith(".bias"):  # biases start at 0
            target.zero_()
            return
        rows = self._drawn(parameter, tuple(part.global_shape))
        box = rows.narrow(0, begin - self.theirs, end - begin)
        target.copy_(box.narrow(1, part.offset[1], part.tensor.shape[1]))

    def _drawn(self, parameter: str, shape: tuple[int, ...]) -> Tensor:
        return _drawn(parameter, shape, self.theirs, self.config, self.seed).to(self.dtype)


@lru_cache(maxsize=2)
def _drawn(
    parameter: str, shape: tuple[int, ...], first: int, config: TransformerConfig, seed: int
) -> Tensor:
    """All rows from `first` on, drawn once for all boxes; less than one multiple."""
    return draw_rows(parameter, shape, range(first, shape[0]), config, seed)


def _table(name: str) -> tuple[str, str] | None:
    """(kind, parameter) of the global name of a tensor that has a row for each token."""
    for parameter in TABLES:
        if name.endswith(f".{parameter}"):
            return name.removesuffix(f".{parameter}"), parameter
    return None
