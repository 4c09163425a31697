"""What a task makes of a data set: examples that are scored one by one, and results of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trainyard.artifacts.digest import SHORT, digest_document
from trainyard.evaluation.metrics import Row, Summary


@dataclass(frozen=True, slots=True)
class ProtocolId:
    """The exact definition of a score, without the model, its tokenizer and the data."""

    name: str
    """Such as LAMBADA/megatron-strict."""
    definition: Mapping[str, Any]
    """All that decides the score; JSON-able. `version` is raised when its code changes scores."""

    @property
    def digest(self) -> str:
        """Differs for different definitions."""
        return digest_document({"name": self.name, **self.definition})[:SHORT]


class Examples(Protocol):
    """A data set under a protocol."""

    @property
    def protocol(self) -> ProtocolId:
        """The definition of its scores."""

    @property
    def unit(self) -> str:
        """What an example is, in the plural."""

    def __len__(self) -> int:
        """Number of examples."""

    def score(self, numbers: range) -> list[Row]:
        """The rows of some examples. All ranks of a copy of the model call it with the same numbers
        at the same time, and get the same rows."""

    def summarize(self, rows: Sequence[Row]) -> Summary:
        """The results of all examples, from their rows in order."""

    def texts(self) -> list[str]:
        """The text of each example, as a training might have seen it."""

    def line(self, task: str, numbers: Mapping[str, Any]) -> str:
        """The line that reports the results."""
