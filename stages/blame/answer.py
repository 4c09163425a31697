"""The answer as a table for a terminal, or as a JSON document."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from trainyard.charts.text_table import text_table
from trainyard.corpus.formats.records import ORIGIN
from trainyard.corpus.provenance.origins import Origin
from trainyard.datasets.serving_order import Place
from trainyard.datasets.trace import DocumentPiece

FORMAT_VERSION = 1
HEADINGS = (
    *("step", "micro-batch", "rank", "row", "sample", "at"),
    *("dataset", "document", "tokens", "source", "line", "bytes", "id"),
)
LEFT = [HEADINGS.index(name) for name in ("dataset", "source", "id")]
NOT_SERVED = ("-",) * len(Place._fields)


@dataclass(frozen=True, slots=True)
class Row:
    """A piece of a document, the place that served it, and its origin."""

    place: Place | None
    """None for a sample that the run never serves."""
    piece: DocumentPiece
    origin: Origin | None
    collected: dict[str, Any] | None = None
    """What the document itself says of where it was collected."""

    def document(self) -> dict[str, Any]:
        """The row of the JSON document."""
        place, piece, origin = self.place, self.piece, self.origin
        return {
            **(place._asdict() if place is not None else dict.fromkeys(Place._fields)),
            "sample": piece.sample,
            "at": piece.at,
            "dataset": piece.prefix,
            "document": piece.document,
            "tokens": [piece.begin, piece.end],
            **(origin._asdict() if origin is not None else dict.fromkeys(Origin._fields)),
            "collected": self.collected,
        }

    def cells(self) -> list[str]:
        """The row of the table."""
        place, piece, origin = self.place, self.piece, self.origin
        served = ("?" if n is None else str(n) for n in place) if place is not None else NOT_SERVED
        return [
            *served,
            *(str(piece.sample), str(piece.at), piece.prefix, str(piece.document)),
            f"{piece.begin}-{piece.end}",
            *_origin_cells(origin),
        ]

    def collected_cell(self) -> str:
        """The last cell, if any row has it: the page, and the bytes in the file of the crawl."""
        if self.collected is None:
            return ""
        first, url = self.collected.get(ORIGIN, {}), self.collected.get("url", "")
        if "file" not in first:
            return str(url)
        begin, member = first.get("offset", 0), ""
        if "within" in first:  # bytes of the contents of a compressed member
            begin, member = first["within"], f"{begin}+"
        end = begin + first.get("length", 0)
        return f"{url} {first['file']}:{member}{begin}-{end}".strip()


@dataclass(frozen=True, slots=True)
class Answer:
    """Rows, and how far they were checked."""

    rows: tuple[Row, ...]
    total: int
    """Number of rows, including those that are not shown."""
    checked_steps: int
    """Number of steps whose samples are those of the ledger."""
    unchecked: tuple[str, ...] = ()
    """Prefixes whose sidecar no manifest lists."""


def _origin_cells(origin: Origin | None) -> list[str]:
    if origin is None:
        return ["?", "?", "?", ""]
    end = origin.offset + origin.length
    return [origin.source, str(origin.line), f"{origin.offset}-{end}", origin.id or ""]


def show(answer: Answer, as_json: bool) -> None:
    """Print it."""
    print(json.dumps(document(answer), indent=1) if as_json else table(answer))


def document(answer: Answer) -> dict[str, Any]:
    """The JSON document; ranges end after their last token or byte."""
    return {
        "format_version": FORMAT_VERSION,
        "total": answer.total,
        "checked_steps": answer.checked_steps,
        "unchecked_sidecars": [f"{prefix}.docs" for prefix in answer.unchecked],
        "rows": [row.document() for row in answer.rows],
    }


def table(answer: Answer) -> str:
    """Text for a terminal."""
    if not answer.total:
        return "no training sample of the run contains any of it"
    cells = [list(HEADINGS), *(row.cells() for row in answer.rows)]
    if any(row.collected is not None for row in answer.rows):
        last = ["collected from", *(row.collected_cell() for row in answer.rows)]
        cells = [[*line, cell] for line, cell in zip(cells, last, strict=True)]
    lines = [*text_table(cells, [*LEFT, len(HEADINGS)]), ""]
    more = answer.total - len(answer.rows)
    if more:
        lines.append(f"and {more} more; --max-rows 0 shows all")
    if answer.checked_steps:
        steps = f"{answer.checked_steps} step{'s' if answer.checked_steps > 1 else ''} checked"
        lines.append(f"{steps}: their samples are those of the ledger")
    lines += [
        f"{prefix}.docs could not be checked: no manifest lists it; its sources are correct if it "
        "was written with these token files"
        for prefix in answer.unchecked
    ]
    return "\n".join(lines).rstrip()
