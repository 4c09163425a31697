"""How often a mixture has each of its sources: pure arithmetic, standard library only.

An epoch of a source is all of its documents once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainyard.errors import DataError

DIGITS = 9
"""Epochs are rounded to these, since 1 - 1e-16 of them means one."""


@dataclass(frozen=True, slots=True)
class Proportions:
    """What is asked of a mixture; of the first three, at most one."""

    weights: tuple[float, ...] | None
    """Share of each source, of any sum."""
    temperature: float | None
    """Shares in proportion to size ** (1 / temperature): 1 keeps the proportions, more levels
    them (Arivazhagan et al. 2019, arXiv:1907.05019, section 3.2)."""
    epochs: tuple[float, ...] | None
    """How often each source is repeated."""
    size: float | None
    """Of the mixture; None: the largest in which no source is repeated too often."""
    max_epochs: float
    """How often a source may be repeated at most, if the epochs are not given."""


def plan_epochs(names: Sequence[str], sizes: Sequence[int], asked: Proportions) -> list[float]:
    """How often each source appears. sizes: of one epoch of each.

    DataError for a source that is empty, or that would be repeated too often."""
    for name, its_size in zip(names, sizes, strict=True):
        if not its_size:
            raise DataError(f"source {name}: it has no text, so it can be no part; leave it out")
    if asked.epochs is not None:
        return list(asked.epochs)
    parts = asked.weights or [one ** (1 / (asked.temperature or 1.0)) for one in sizes]
    # Sizes of mixtures that have one source exactly once.
    once = [one * sum(parts) / part for one, part in zip(sizes, parts, strict=True)]
    size: float | None = asked.size
    if size is None:
        is_plain = asked.weights is None and asked.temperature is None
        size = sum(sizes) if is_plain else asked.max_epochs * min(once)
    epochs = [round(size / one, DIGITS) for one in once]
    for name, found in zip(names, epochs, strict=True):
        if found > round(asked.max_epochs, DIGITS):
            raise DataError(
                f"source {name}: a mixture of {size:.0f} would repeat it {found:.2f} times, more "
                f"than --max-epochs {asked.max_epochs:g}; raise that, or lower --size or its weight"
            )
    return epochs
