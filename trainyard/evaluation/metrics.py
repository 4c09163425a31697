"""Figures of an evaluation, each with its standard error, from the rows of its examples.

A figure is f(factor * sum of totals / sum of weights), with f the identity or exp. Its standard
error comes from the spread of the examples by the delta method: for a ratio r of sums, the residual
of an example is total - r * weight (Cochran, Sampling Techniques, 6.4). For equal weights that is
the standard error of a mean. numpy only."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import ArtifactError, DataError
from trainyard.logging import shortened

Row = dict[str, Any]
"""What is known of one example: its number (`example`), its scores. JSON-able."""
Floats = NDArray[np.float64]

LARGEST_EXPONENT = 20.0
"""Losses above it are reported as exp(20), as upstream does."""


@dataclass(frozen=True, slots=True)
class Metric:
    """How a figure follows from rows."""

    total: str
    """Key of the number that is added up."""
    weight: str | None = None
    """Key of the number of things that it is about; None: 1, for a mean over examples."""
    better: Literal["higher", "lower"] = "higher"
    factor: float = 1.0
    exponential: bool = False
    of_tokens: bool = False
    """Whether the figure means nothing beside that of another tokenizer."""

    def sums(self, rows: Sequence[Row]) -> tuple[Floats, Floats]:
        """(n,) totals and (n,) weights of the rows that have the total; others take no part."""
        kept = [row for row in rows if row.get(self.total) is not None]
        totals = np.array([_number(row, self.total) for row in kept])
        if self.weight is None:
            return totals, np.ones(len(kept))
        return totals, np.array([_number(row, self.weight) for row in kept])

    def value(self, total: float, weight: float) -> float:
        """The figure of sums; NaN for no weight."""
        if not weight:
            return math.nan
        scaled = self.factor * total / weight
        return math.exp(min(LARGEST_EXPONENT, scaled)) if self.exponential else scaled

    def document(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The figure of all rows with its standard error, as the passport has them. `stderr` is
        None for fewer than two examples."""
        totals, weights = self.sums(rows)
        count, weight = len(totals), float(weights.sum())
        if not count or not weight:
            return {"value": None, "stderr": None, "count": count, **self._definition()}
        ratio = math.fsum(totals) / weight
        value = self.value(ratio, 1.0)
        stderr = None
        if count > 1:
            residuals = totals - ratio * weights
            spread = math.sqrt(count / (count - 1) * float(residuals @ residuals)) / weight
            stderr = abs(self.factor) * spread * (value if self.exponential else 1.0)
        return {"value": value, "stderr": stderr, "count": count, **self._definition()}

    def _definition(self) -> dict[str, Any]:
        return {
            "total": self.total,
            "weight": self.weight,
            "better": self.better,
            "factor": self.factor,
            "exponential": self.exponential,
            "of_tokens": self.of_tokens,
        }

    @classmethod
    def read(cls, document: Mapping[str, Any], where: str) -> Metric:
        """The metric of a passport; ArtifactError for another document."""
        kinds: dict[str, tuple[type, ...]] = {
            "total": (str,),
            "weight": (str, type(None)),
            "factor": (int, float),
            "exponential": (bool,),
            "of_tokens": (bool,),
        }
        for key, allowed in kinds.items():
            if type(document.get(key, NotImplemented)) not in allowed:
                raise ArtifactError(f"{where}: a figure of its passport has no valid {key!r}")
        if document.get("better") not in ("higher", "lower"):
            raise ArtifactError(f"{where}: a figure of its passport has no valid 'better'")
        if not abs(document["factor"]) <= sys.float_info.max:
            raise ArtifactError(f"{where}: a figure of its passport has no finite 'factor'")
        return cls(**{key: document[key] for key in (*kinds, "better")})


def _number(row: Row, key: str) -> float:
    """A number of a row; DataError for one that has none there."""
    try:
        return float(row[key])
    except (KeyError, OverflowError, TypeError, ValueError):
        what = f"example {shortened(str(row.get('example')))} has no number in {key!r}"
        raise DataError(f"{what}; its file was changed: evaluate again") from None


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of one data set."""

    numbers: dict[str, Any]
    """By the names of `results.json`."""
    metrics: dict[str, Metric]
    """Those of the numbers that are figures of the examples."""

    def documents(self, rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
        """The figures with their standard errors."""
        return {name: metric.document(rows) for name, metric in self.metrics.items()}
