"""The datasheet of a corpus as HTML, of the document that `stages.datasheet` writes.

A section with its own style, which stands alone in a page or inside the run card. Pictures are SVG;
nothing is loaded. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trainyard.charts.markup import Child, Markup, element
from trainyard.charts.numbers import percent, scaled, whole

CSS = Path(__file__).with_name("datasheet.css")

WIDTH, ROW, LABEL, NUMBER = 860, 24, 240, 190
"""Of the funnel: its width, the height of a row, the widths of the label and the number."""
COLUMN, HEIGHT = 64, 150
"""Of a histogram: the width of a column, the height of the tallest."""
EXCERPT = 200
MOST_BITS = 64
"""Of a number of characters."""


def page(document: dict[str, Any]) -> str:
    """The whole page. ArithmeticError, AttributeError, LookupError, TypeError or ValueError for
    another document."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{document['title']}: datasheet"),
    )
    title = element("h1", str(document["title"]))
    main = element(
        "main", element("p", "Datasheet of a corpus", class_="kind"), title, section(document)
    )
    return "<!doctype html>\n" + element(
        "html", head, element("body", main, class_="sheet-page"), lang="en"
    )


def section(document: dict[str, Any]) -> Markup:
    """What is known of the corpus, for a page or the run card."""
    steps = document["steps"]
    return element(
        "div",
        element("style", Markup(CSS.read_text("utf-8"))),
        _sizes(document),
        _part("From the sources to the corpus", funnel(steps), _steps_table(steps)),
        _part("Where it is from", element("div", *_tables(document), class_="tables")),
        _part("Characters in a document", _lengths(document["lengths"])),
        _part("Documents in a cluster of duplicates", _clusters(steps)),
        _part("Evaluation sets that were looked for", _tasks(steps)),
        _part("The mixture", _mixture(steps)),
        _part("Samples of what was removed or changed", *_samples(steps)),
        class_="sheet",
    )


def _part(title: str, *content: Child) -> Markup | None:
    """A part of the sheet; None if there is nothing in it."""
    found = [one for one in content if one]
    return element("section", element("h2", title), *found) if found else None


def table(names: Sequence[str], rows: Iterable[Sequence[Child]]) -> Markup | None:
    """A table whose first column is text and whose others are numbers; None without rows."""
    body = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
    if not body:
        return None
    head = element("thead", element("tr", *(element("th", name, scope="col") for name in names)))
    return element("div", element("table", head, element("tbody", *body)), class_="scroll")


# --- parts ----------------------------------------------------------------------------------------


def _sizes(document: dict[str, Any]) -> Markup:
    languages = document["languages"]
    identified = sum(count for _, count in languages) or 1
    facts = [
        ("documents", whole(document["documents"])),
        ("words", scaled(document["words"])),
        ("characters", scaled(document["chars"])),
        ("languages", ", ".join(f"{n} {percent(c / identified)}" for n, c in languages[:3])),
        ("licences", "; ".join(document["licenses"]) or "not named"),
    ]
    return element(
        "dl",
        *(
            element("div", element("dt", name), element("dd", value))
            for name, value in facts
            if value
        ),
        class_="sizes",
    )


def funnel(steps: Sequence[dict[str, Any]]) -> Markup | None:
    """How many documents were left after each rule that dropped some."""
    rows = list(funnel_rows(steps))
    most = max((before for _, before, _ in rows), default=0)
    if not most:
        return None
    drawn = []
    room = WIDTH - LABEL - NUMBER
    for i, (label, before, after) in enumerate(rows):
        y, scale = i * ROW, room / most
        gone = before - after
        text = whole(after) + (f"  \u2212{whole(gone)}" if gone else "")
        drawn += [
            element("text", label, x=LABEL - 10, y=y + 16, text_anchor="end"),
            element(
                "rect", x=LABEL, y=y + 4, width=float(after * scale), height=ROW - 8, class_="kept"
            ),
            element(
                "rect",
                x=float(LABEL + after * scale),
                y=y + 4,
                width=float(gone * scale),
                height=ROW - 8,
                class_="gone",
            ),
            element("text", text, x=float(LABEL + before * scale + 8), y=y + 16, class_="number"),
        ]
    alt = element(
        "title", f"Documents left after each rule: from {whole(most)} to {whole(rows[-1][2])}"
    )
    box = f"0 0 {WIDTH} {len(rows) * ROW}"
    return element("svg", alt, *drawn, viewBox=box, role="img", class_="funnel")


def funnel_rows(steps: Sequence[dict[str, Any]]) -> Iterable[tuple[str, int, int]]:
    """(label, documents before, after) of the sources and of every rule that dropped documents."""
    for number, step in enumerate(steps):
        left = step["documents"] + step["bad_lines"]
        if not number:
            yield "sources", left, left
        dropped = [("bad lines", step["bad_lines"])]
        dropped += [(rule, reason["dropped"]) for rule, reason in step["reasons"].items()]
        for rule, count in dropped:
            if count:
                yield f"{step['stage']}: {short(rule)}", left, left - count
                left -= count
    if steps:
        yield "corpus", (kept := steps[-1]["kept"]), kept


def short(rule: str, most: int = 24) -> str:
    """A rule that fits beside a bar; the tables have it whole."""
    return rule if len(rule) <= most else rule[: most - 1] + "\u2026"


def _steps_table(steps: Sequence[dict[str, Any]]) -> Markup | None:
    rows: list[Sequence[Child]] = []
    for step in steps:
        for rule, reason in step["reasons"].items():
            if reason["dropped"] or reason["changed"]:
                rows.append(
                    (
                        f"{step['stage']}: {rule}",
                        whole(reason["dropped"]),
                        percent(reason["dropped"] / max(step["documents"], 1)),
                        whole(reason["dropped_chars"]),
                        whole(reason["changed"]),
                        whole(reason["removed_chars"]),
                    )
                )
    names = ("rule", "dropped", "of its stage", "characters", "changed", "characters cut")
    return table(names, rows)


def _tables(document: dict[str, Any]) -> list[Markup | None]:
    total = max(document["documents"], 1)

    def shares(name: str, key: str, of: int) -> Markup | None:
        rows = [(one, whole(count), percent(count / of)) for one, count in document[key]]
        return table((name, "documents", "share"), rows)

    named = sum(count for _, count in document["languages"]) or 1
    return [
        shares("source", "sources", total),
        shares(f"host, of {whole(document['num_hosts'])}", "hosts", total),
        shares(f"language, of {whole(named)} documents drawn", "languages", named),
        shares("licence that the document names", "document_licenses", total),
    ]


def histogram(bars: Sequence[tuple[str, int]], description: str) -> Markup | None:
    """Columns with their numbers above and their labels below."""
    most = max((count for _, count in bars), default=0)
    if not most:
        return None
    drawn = []
    for i, (label, count) in enumerate(bars):
        x, height = i * COLUMN, HEIGHT * count / most
        middle = x + COLUMN / 2
        drawn += [
            element(
                "rect",
                x=x + 6,
                y=float(20 + HEIGHT - height),
                width=COLUMN - 12,
                height=float(height),
                class_="kept",
            ),
            element(
                "text",
                scaled(count),
                x=float(middle),
                y=float(14 + HEIGHT - height),
                text_anchor="middle",
                class_="number",
            ),
            element("text", label, x=float(middle), y=HEIGHT + 38, text_anchor="middle"),
        ]
    width = len(bars) * COLUMN
    alt = element("title", description)
    style = f"max-width:{width}px"
    return element(
        "svg", alt, *drawn, viewBox=f"0 0 {width} {HEIGHT + 46}", role="img", style=style
    )


def _lengths(lengths: Sequence[Sequence[int]]) -> Markup | None:
    counts = {one[0]: one[1] for one in lengths}
    if not counts:
        return None
    if not all(0 <= bits <= MOST_BITS for bits in counts):
        raise ValueError(f"no document has 2 ** {max(counts)} characters")
    span = range(min(counts), max(counts) + 1)
    bars = [(f"<{scaled(2**bits)}", counts.get(bits, 0)) for bits in span]
    return histogram(bars, "Documents by their number of characters, in powers of two")


def _clusters(steps: Sequence[dict[str, Any]]) -> Markup | None:
    bins: dict[int, int] = {}
    for size, count in (pair for step in steps for pair in step["clusters"]):
        bits = (size - 1).bit_length()  # 2; 3 to 4; 5 to 8; ...
        bins[bits] = bins.get(bits, 0) + count
    if not bins:
        return None
    bars = [(_span(bits), bins.get(bits, 0)) for bits in range(1, max(bins) + 1)]
    return histogram(bars, "Clusters of duplicates by their number of documents")


def _span(bits: int) -> str:
    first, last = 2 ** (bits - 1) + 1, 2**bits
    return str(last) if first == last else f"{scaled(first)}\u2013{scaled(last)}"


def _tasks(steps: Sequence[dict[str, Any]]) -> Markup | None:
    keys = ("ngrams", "occurrences", "documents")
    rows = [
        (name, *(whole(one[key]) for key in keys))
        for step in steps
        for name, one in step["tasks"].items()
    ]
    return table(("evaluation set", "n-grams", "occurrences", "documents with one"), rows)


def _mixture(steps: Sequence[dict[str, Any]]) -> Markup | None:
    rows = [
        (
            name,
            *(whole(one["size"]), percent(one["share"]), f"{one['epochs']:.3g}"),
            *(whole(one["mixed_size"]), percent(one["mixed_share"])),
        )
        for step in steps
        for name, one in step["mixture"].items()
    ]
    return table(("source", "size", "share", "epochs", "in the mixture", "share there"), rows)


def _samples(steps: Sequence[dict[str, Any]]) -> list[Markup]:
    """Removed documents by reason, folded."""
    folds = []
    for step in steps:
        for rule, reason in step["reasons"].items():
            if not reason["samples"]:
                continue
            items = [
                element(
                    "li",
                    element("span", why, class_="why"),
                    element("q", text[:EXCERPT]),
                    element("small", f"{file}:{offset}"),
                )
                for _, file, offset, why, text in reason["samples"]
            ]
            summary = element("summary", f"{step['stage']}: {rule}")
            folds.append(element("details", summary, element("ul", *items)))
    return folds
