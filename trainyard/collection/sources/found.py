"""What every source makes of its records: documents that are kept, and others with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainyard.collection.documents import Place, dropped
from trainyard.collection.tally import Tally
from trainyard.corpus.formats.records import ORIGIN

TEXT = "text"

EMPTY = "empty"
"""No text is left of a record."""
TOO_LARGE = "too_large"
"""It has more bytes than the limit."""
BAD_RECORD = "bad_record"
"""It is not what its format says."""


class Found(NamedTuple):
    """A record of a source."""

    place: Place
    fields: dict[str, Any]
    """Its metadata, such as title and URL; of a kept one also the text."""
    reason: str = ""
    """Why it is dropped; empty: it is kept."""
    why: str = ""
    """The message for this record: the reason with its details."""


@dataclass(slots=True)
class Sorter:
    """Turns records into documents, and counts them."""

    reasons: Iterable[str]
    num_samples: int
    tally: Tally = field(init=False)

    def __post_init__(self) -> None:
        self.tally = Tally.of(self.reasons)

    def document(self, found: Found) -> tuple[Mapping[str, Any], bool]:
        """The document to write, and whether it is kept."""
        tally, text = self.tally, found.fields.get(TEXT, "")
        fields = {**found.fields, ORIGIN: found.place.document()}
        tally.documents += 1
        tally.chars += len(text)
        if not found.reason:
            tally.kept += 1
            tally.kept_chars += len(text)
            return fields, True
        reason = tally.reasons[found.reason]
        reason.dropped += 1
        reason.dropped_chars += len(text)
        shown = str(found.fields.get("title") or found.fields.get("url") or "")
        reason.sample(self.num_samples, found.place, found.why, shown)
        return dropped(fields, found.reason, found.why), False
