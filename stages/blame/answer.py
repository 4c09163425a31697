"""What is printed: a table for people, a document for programs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from trainyard.corpus.provenance import Origin
from trainyard.datasets.serving_order import Place
from trainyard.datasets.trace import DocumentPiece

FORMAT_VERSION = 1
HEADINGS = (
    *("step", "micro-batch", "rank", "row", "sample", "at"),
    *("dataset", "document", "tokens", "source", "line", "bytes", "id"),
)
LEFT = {"dataset", "source", "id"}
NOT_SERVED = ("-",) * len(Place._fields)


@dataclass(frozen=True, slots=True)
class Row:
    """A piece of a document, where it was served, and where it came from."""

    place: Place | None
    """None for a sample that the run does not serve."""
    piece: DocumentPiece
    origin: Origin | None

    def document(self) -> dict[str, Any]:
        """For programs."""
        place, piece, origin = self.place, self.piece, self.origin
        return {
            **(place._asdict() if place is not None else dict.fromkeys(Place._fields)),
            "sample": piece.sample,
            "at": piece.at,
            "dataset": piece.prefix,
            "document": piece.document,
            "tokens": [piece.begin, piece.end],
            **(origin._asdict() if origin is not None else dict.fromkeys(Origin._fields)),
        }

    def cells(self) -> list[str]:
        """For people."""
        place, piece, origin = self.place, self.piece, self.origin
        served = ("?" if n is None else str(n) for n in place) if place is not None else NOT_SERVED
        return [
            *served,
            *(str(piece.sample), str(piece.at), piece.prefix, str(piece.document)),
            f"{piece.begin}-{piece.end}",
            *_origin_cells(origin),
        ]


@dataclass(frozen=True, slots=True)
class Answer:
    """Rows, and what is known of them."""

    rows: tuple[Row, ...]
    total: int
    """Rows there are, those that are not shown included."""
    checked_steps: int
    """Steps whose samples the ledger of the run confirmed."""
    unchecked: tuple[str, ...] = ()
    """Prefixes of rows whose sources are told by a sidecar that no manifest lists."""


def _origin_cells(origin: Origin | None) -> list[str]:
    if origin is None:
        return ["?", "?", "?", ""]
    end = origin.offset + origin.length
    return [origin.source, str(origin.line), f"{origin.offset}-{end}", origin.id or ""]


def show(answer: Answer, as_json: bool) -> None:
    """Print it."""
    print(json.dumps(document(answer), indent=1) if as_json else table(answer))


def document(answer: Answer) -> dict[str, Any]:
    """The answer for programs; ranges end behind their last token or byte."""
    return {
        "format_version": FORMAT_VERSION,
        "total": answer.total,
        "checked_steps": answer.checked_steps,
        "unchecked_sidecars": [f"{prefix}.docs" for prefix in answer.unchecked],
        "rows": [row.document() for row in answer.rows],
    }


def table(answer: Answer) -> str:
    """The answer for people."""
    if not answer.total:
        return "no training sample of the run holds any of it"
    cells = [list(HEADINGS), *(row.cells() for row in answer.rows)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(HEADINGS))]
    lines = [
        "  ".join(
            text.ljust(width) if heading in LEFT else text.rjust(width)
            for text, width, heading in zip(row, widths, HEADINGS, strict=True)
        ).rstrip()
        for row in cells
    ]
    lines.append("")
    more = answer.total - len(answer.rows)
    if more:
        lines.append(f"and {more} more; --max-rows 0 shows all")
    if answer.checked_steps:
        steps = f"{answer.checked_steps} step{'s' if answer.checked_steps > 1 else ''} checked"
        lines.append(f"{steps}: the samples of these steps are as the ledger has them")
    lines += [
        f"{prefix}.docs could not be checked: no manifest lists it; its sources are right if it "
        "was made with this pair"
        for prefix in answer.unchecked
    ]
    return "\n".join(lines).rstrip()
