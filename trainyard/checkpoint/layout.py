"""The tensors of a step that a rank holds, and whether they match those of a checkpoint.

`plan` decides how they are laid out in files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from trainyard.checkpoint.plan import (
    Slice,
)
from trainyard.checkpoint.safetensors.file import DTYPES, spec_of
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.errors import ArtifactError


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """This rank's part of a tensor: `tensor` starts at `offset` of the global one."""

    name: str
    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]

    @staticmethod
    def whole(name: str, tensor: torch.Tensor) -> ShardedTensor:
        """A tensor that this rank holds completely."""
        return ShardedTensor(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())

    @property
    def slice(self) -> Slice:
        """Its description in a file plan."""
        spec = spec_of(self.tensor)
        whole, offset = tuple(self.global_shape), tuple(self.offset)
        return Slice(self.name, spec.dtype, whole, offset, spec.shape)


LocalTensors = torch.Tensor | ShardedTensor | Sequence[ShardedTensor]
"""A rank's part of a tensor: all of it, one slice, or several."""


def slices_held(name: str, held: LocalTensors) -> list[ShardedTensor]:
    """The slices of the tensor called `name` that a rank holds."""
    if isinstance(held, torch.Tensor):
        return [ShardedTensor.whole(name, held)]
    slices = [held] if isinstance(held, ShardedTensor) else list(held)
    assert all(part.name == name for part in slices), f"{name}: passed with {slices}"
    return slices


# --- what fits --------------------------------------------------------------------------------


LISTED = 20
"""Tensors named in a refusal; the rest are counted."""


def refuse_differences(
    url: str,
    held: Mapping[str, TensorSpec],
    wanted: Mapping[str, Sequence[ShardedTensor]],
    prefix: str,
    elsewhere: Collection[str] = (),
) -> None:
    """Raise ArtifactError, which lists missing and unexpected tensors and those of another shape.

    held: tensors of the checkpoint at `url` under `prefix`. elsewhere: names that other ranks
    fill."""
    missing = sorted(wanted.keys() - held.keys())
    unexpected = sorted(held.keys() - wanted.keys() - set(elsewhere))
    differing = []
    for name in sorted(wanted.keys() & held.keys()):
        if not wanted[name]:
            continue
        spec, first = held[name], wanted[name][0]
        if spec.shape != tuple(first.global_shape):
            differing.append(f"{name} is {list(spec.shape)}, wanted {list(first.global_shape)}")
        elif DTYPES[spec.dtype].is_floating_point != first.tensor.dtype.is_floating_point:
            differing.append(f"{name} is {spec.dtype}, wanted {first.tensor.dtype}")
    lists = (
        listed("missing", missing)
        + listed("unexpected", unexpected)
        + listed("of another shape or type", differing)
    )
    if lists:
        raise ArtifactError(
            f"{url}: the tensors under {prefix!r} do not match the model; check that its options "
            f"are those of the checkpoint{lists}"
        )


def listed(label: str, names: Sequence[str]) -> str:
    """A line with the number of names, and the first 20 below it; empty without names."""
    if not names:
        return ""
    lines = "".join(f"\n    {name}" for name in names[:LISTED])
    more = f"\n    ... and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"\n  {len(names)} {label}:{lines}{more}"
