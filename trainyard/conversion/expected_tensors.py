"""What the tensors of a model should be, and a refusal that lists how those of a source differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from trainyard.artifacts.strict_json import shown
from trainyard.errors import ArtifactError
from trainyard.models.config import TransformerConfig
from trainyard.models.families import family_of

Shapes = Mapping[str, Sequence[int]]

LISTED = 20
"""Tensors of each kind that a refusal names; the rest are counted."""

MAX_NAME = 300
"""Letters of a line of the list."""


def model_shapes(config: TransformerConfig, padded_vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model, by its name there; no memory is taken."""
    with torch.device("meta"):
        model = family_of(config).load_class()(config, padded_vocab_size)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def refuse_differences(held: Shapes, wanted: Shapes, url: str, told_by: str) -> None:
    """Refuse tensors that are not those that `told_by` asks for."""
    missing = sorted(set(wanted) - set(held))
    unexpected = sorted(set(held) - set(wanted))
    differing = [
        f"{name} is {shown(list(held[name]))}, wanted {list(wanted[name])}"
        for name in sorted(set(wanted) & set(held))
        if tuple(held[name]) != tuple(wanted[name])
    ]
    lists = (
        _listed("missing", missing)
        + _listed("unexpected", unexpected)
        + _listed("of another shape", differing)
    )
    if lists:
        raise ArtifactError(f"{url}: its tensors are not those that {told_by} asks for{lists}")


def _listed(label: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    lines = "".join(f"\n    {_plain(name)}" for name in names[:LISTED])
    more = f"\n    ... and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"\n  {len(names)} {label}:{lines}{more}"


def _plain(name: str) -> str:
    """As a terminal may show it: names are what a file says."""
    return name if name.isprintable() and len(name) <= MAX_NAME else shown(name)
