"""Counts of what became of documents, by reason, and a sample for each reason.

Tallies of units add up to that of the input, in any order: the sample of a reason is the documents
with the smallest hash of their place."""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from trainyard.collection.documents import Place

EXCERPT = 200
"""Characters of a text in a sample."""
MOST = 2**63
"""Below it are all counts."""


@dataclass(slots=True)
class Reason:
    """What one rule did."""

    dropped: int = 0
    """Documents."""
    dropped_chars: int = 0
    changed: int = 0
    """Documents that stayed with another text."""
    removed_lines: int = 0
    removed_chars: int = 0
    """Of changed documents; negative where they became longer."""
    samples: list[list[Any]] = field(default_factory=list)
    """[hash, file, offset, why, beginning of the text]."""

    def sample(self, most: int, place: Place, why: str, text: str) -> None:
        """Consider a document for the sample of `most`."""
        if not most:
            return
        spelled = f"{place.file}:{place.offset}"
        if place.within is not None:
            spelled += f":{place.within}"
        number = zlib.crc32(spelled.encode())
        if len(self.samples) < most or number <= self.samples[-1][0]:
            row = [number, place.file, place.offset, why, text[:EXCERPT]]
            self.samples = heapq.nsmallest(most, [*self.samples, row])


SAMPLE = (int, str, int, str, str)


@dataclass(slots=True)
class Tally:
    """Of a unit, a share or an input."""

    documents: int = 0
    chars: int = 0
    kept: int = 0
    kept_chars: int = 0
    bad_lines: int = 0
    reasons: dict[str, Reason] = field(default_factory=dict)
    """By rule, in the order in which they apply."""

    @staticmethod
    def of(names: Iterable[str]) -> Tally:
        """An empty one, with all its reasons."""
        return Tally(reasons={name: Reason() for name in names})

    def add(self, other: Tally, most: int) -> None:
        """Count the documents of another tally too. most: samples of a reason."""
        for name in ("documents", "chars", "kept", "kept_chars", "bad_lines"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for rule, theirs in other.reasons.items():
            ours = self.reasons.setdefault(rule, Reason())
            for name in ("dropped", "dropped_chars", "changed", "removed_lines", "removed_chars"):
                setattr(ours, name, getattr(ours, name) + getattr(theirs, name))
            ours.samples = heapq.nsmallest(most, [*ours.samples, *theirs.samples])

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @staticmethod
    def parse(document: dict[str, Any]) -> Tally:
        """From `document`; TypeError, KeyError or AttributeError for another one."""
        reasons = {name: Reason(**one) for name, one in document["reasons"].items()}
        found = Tally(**{**document, "reasons": reasons})
        _check(found)
        for reason in reasons.values():
            _check(reason)
        return found

    def metrics(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "documents": self.documents,
            "kept_documents": self.kept,
            "chars": self.chars,
            "kept_chars": self.kept_chars,
            "bad_lines": self.bad_lines,
            "dropped": {name: one.dropped for name, one in self.reasons.items()},
        }


def _check(found: Tally | Reason) -> None:
    for one in fields(found):
        value = getattr(found, one.name)
        if one.type == "int" and (type(value) is not int or abs(value) >= MOST):
            raise TypeError(f"{one.name} is no count")
    if isinstance(found, Reason):
        kinds = [tuple(map(type, row)) for row in found.samples]
        if not isinstance(found.samples, list) or any(kind != SAMPLE for kind in kinds):
            raise TypeError("a sample is not [hash, file, offset, why, text]")
