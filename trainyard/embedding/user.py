"""Embedders of other packages (see `installed`). One offers a function by an entry point:

    [project.entry-points."trainyard.embedders"]
    in-house = "our_package.retrieval:embed"

`--embedder in-house` calls `embed(texts: list[str])` for some thousand texts at a time. It returns
an array (texts, dimensions) of float32, one row for each text in order, and may load its model on
the first call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.embedding.installed import OPTION, load_embedder
from trainyard.errors import DataError
from trainyard.installed import call_installed

Embed = Callable[[list[str]], Any]

TEXTS_AT_ONCE = 4096
"""Texts of a call."""


@dataclass(frozen=True, slots=True)
class UserEmbedder:
    """Vectors by a function of another package."""

    name: str
    function: Embed
    dimensions: int
    """Of a vector."""

    def prepare(self, texts: Sequence[str]) -> tuple[list[str], int]:
        """The texts; how many tokens they have is not known."""
        return list(texts), 0

    def embed(self, prepared: list[str]) -> NDArray[np.float32]:
        """Their vectors. DataError for an array of another shape, of other numbers than float32, or
        with NaN or infinity."""
        found = np.empty((len(prepared), self.dimensions), np.float32)
        for first in range(0, len(prepared), TEXTS_AT_ONCE):
            some = prepared[first : first + TEXTS_AT_ONCE]
            found[first : first + len(some)] = _called(
                self.name, self.function, some, self.dimensions
            )
        return found


def load_user_embedder(name: str) -> UserEmbedder:
    """The function of that name, tried on a text, which says how long its vectors are."""
    function: Embed = load_embedder(name)
    return UserEmbedder(name, function, _called(name, function, ["a text"], None).shape[1])


def _called(
    name: str, function: Embed, texts: list[str], dimensions: int | None
) -> NDArray[np.float32]:
    """(texts, dimensions) what the function returns. dimensions: None if any will do."""
    found = call_installed(OPTION, name, lambda: np.asarray(function(texts)))
    wanted = (len(texts), found.shape[-1] if found.ndim and dimensions is None else dimensions)
    if found.shape != wanted or not found.size or found.dtype != np.float32:
        shape = f"({len(texts)}, {'dimensions' if dimensions is None else dimensions})"
        raise DataError(
            f"{OPTION} {name}: gave {found.dtype} {found.shape} for {len(texts)} texts; it must "
            f"return float32 {shape}"
        )
    if not np.isfinite(found).all():
        bad = int(np.flatnonzero(~np.isfinite(found).all(axis=1))[0])
        raise DataError(f"{OPTION} {name}: NaN or infinity for the text {texts[bad]!r:.80}")
    return found
