"""What a rank holds of the tensors of a step. How they are laid out in files: `plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainyard.checkpoint.plan import (
    KINDS,
    SHARD_SIZE_BYTES,
    PlannedFile,
    Slice,
    assign,
    entries_of,
    pack,
    plan_files,
    split_large,
)
from trainyard.checkpoint.safetensors.header import TensorSpec

__all__ = [
    "KINDS",
    "SHARD_SIZE_BYTES",
    "Held",
    "PlannedFile",
    "ShardedTensor",
    "Slice",
    "assign",
    "entries_of",
    "pack",
    "plan_files",
    "slices_held",
    "split_large",
]


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """This rank's part of a tensor: `tensor` begins at `offset` of the global one."""

    name: str
    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]

    @staticmethod
    def whole(name: str, tensor: torch.Tensor) -> ShardedTensor:
        """A tensor of which this rank has all."""
        return ShardedTensor(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())

    @property
    def slice(self) -> Slice:
        """What is written of it."""
        spec = TensorSpec.of(self.tensor)
        whole, offset = tuple(self.global_shape), tuple(self.offset)
        return Slice(self.name, spec.dtype, whole, offset, spec.shape)


Held = torch.Tensor | ShardedTensor | Sequence[ShardedTensor]
"""What a rank holds of a tensor: all of it, a slice, or several."""


def slices_held(name: str, held: Held) -> list[ShardedTensor]:
    """The slices of the tensor called `name` that a rank holds."""
    if isinstance(held, torch.Tensor):
        return [ShardedTensor.whole(name, held)]
    slices = [held] if isinstance(held, ShardedTensor) else list(held)
    assert all(part.name == name for part in slices), f"{name}: passed with {slices}"
    return slices
