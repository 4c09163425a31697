"""Classifiers of other packages. One offers a function by an entry point:

    [project.entry-points."trainyard.classifiers"]
    in-house = "our_package.safety:toxicity"

`--classifier in-house` calls `toxicity(texts: list[str])` for some hundred texts at a time. It
returns as many numbers from 0 to 1, the probability that each text is toxic (or whatever else the
scores are of), in order. It may load its model on the first call; every worker loads its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.classifiers.installed import OPTION, load_classifier
from trainyard.errors import DataError
from trainyard.installed import call_installed

Classify = Callable[[list[str]], Any]


@dataclass(frozen=True, slots=True)
class UserClassifier:
    """Scores by a function of another package."""

    name: str
    function: Classify

    @staticmethod
    def load(name: str) -> UserClassifier:
        """The function of that name, tried on a text. ConfigError if there is none, DataError
        for what is no score."""
        found = UserClassifier(name, load_classifier(name))
        found.score(["a text"])
        return found

    def score(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """(texts,) DataError for another shape, numbers outside 0 to 1, and what it raises."""
        found = call_installed(OPTION, self.name, lambda: np.asarray(self.function(list(texts))))
        if found.shape != (len(texts),) or found.dtype.kind != "f":
            raise DataError(
                f"{OPTION} {self.name}: gave {found.dtype} {found.shape} for {len(texts)} texts; "
                "it must return a floating-point number for each"
            )
        inside = (found >= 0) & (found <= 1)
        if not inside.all():
            bad = int(np.flatnonzero(~inside)[0])
            raise DataError(
                f"{OPTION} {self.name}: gave {found[bad]} for the text {texts[bad]!r:.80}; a score "
                "is a probability, from 0 to 1"
            )
        return found.astype(np.float64)
