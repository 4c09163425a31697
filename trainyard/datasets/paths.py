"""What a person writes about where samples come from: blends, splits. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainyard.errors import ConfigError

SPLIT_NAMES = ("train", "valid", "test")


@dataclass(frozen=True, slots=True)
class Source:
    """One prefix of a blend."""

    prefix: str
    weight: float | None
    """Its share, relative to the others; None when no weights were given."""


def parse_split(split: str) -> list[tuple[float, float]]:
    """Bounds of training, validation and test: "969, 30, 1" is 0 to 0.969, to 0.999, to 1."""
    try:
        parts = [float(part) for part in re.findall(r"[.0-9]+", split)]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or re.search(r"[^.0-9,\s]", split) or sum(parts) <= 0:
        raise ConfigError(
            f"--split {split!r} must be up to three numbers of at least 0, such as '969, 30, 1'"
        )
    parts += [0.0] * (3 - len(parts))
    # One after the other in float64, as numpy sums three: a better sum cuts at other documents.
    total = parts[0] + parts[1] + parts[2]
    bounds = [0.0]
    for part in parts:
        bounds.append(bounds[-1] + part / total)
    return [(bounds[0], bounds[1]), (bounds[1], bounds[2]), (bounds[2], bounds[3])]


def parse_blend(paths: Sequence[str], flag: str) -> list[Source]:
    """`WEIGHT PREFIX ...` or `PREFIX ...` as sources."""
    weights = [_number(path) for path in paths[::2]]
    if len(paths) < 2 or all(weight is None for weight in weights):
        sources = [Source(path, None) for path in paths]
    elif len(paths) % 2 or None in weights:
        raise ConfigError(
            f"{flag} {' '.join(paths)}: give every prefix a weight (WEIGHT PREFIX WEIGHT PREFIX "
            "...) or none of them"
        )
    else:
        sources = [Source(p, w) for w, p in zip(weights, paths[1::2], strict=True)]
    for source in sources:
        _check_prefix(source.prefix, flag)
    return sources


def has_weights(sources: Sequence[Source]) -> bool:
    """Whether a blend is one by weight."""
    return any(source.weight is not None for source in sources)


def _check_prefix(prefix: str, flag: str) -> None:
    if prefix.endswith((".bin", ".idx")):
        raise ConfigError(f"{flag} {prefix}: give the prefix of the pair, {prefix[:-4]}")
    if _number(prefix) is not None:
        raise ConfigError(f"{flag}: {prefix} stands where a prefix is expected")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
