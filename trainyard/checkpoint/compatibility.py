"""Whether a checkpoint and what it is to fill are of one model; a refusal lists what differs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from trainyard.checkpoint.layout import ShardedTensor
from trainyard.checkpoint.safetensors.dtypes import DTYPES
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.errors import ArtifactError

LISTED = 20
"""Tensors named in a refusal; the rest are counted."""


def refuse_differences(
    url: str,
    held: Mapping[str, TensorSpec],
    wanted: Mapping[str, Sequence[ShardedTensor]],
    prefix: str,
    elsewhere: Collection[str] = (),
) -> None:
    """Raise ArtifactError that lists what is missing, unexpected or of another shape.

    held: what the checkpoint at `url` has under `prefix`. elsewhere: names that others fill."""
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
            f"{url}: the tensors under {prefix!r} do not fit what they are loaded into; "
            f"check that the model options are those of the checkpoint{lists}"
        )


def listed(label: str, names: Sequence[str]) -> str:
    """Names under a line that counts them, the first 20 of them; nothing where there are none."""
    if not names:
        return ""
    lines = "".join(f"\n    {name}" for name in names[:LISTED])
    more = f"\n    ... and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"\n  {len(names)} {label}:{lines}{more}"
