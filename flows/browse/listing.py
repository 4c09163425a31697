"""A folder as a page: what lies in it, by name and size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import quote

from stages.report.formats import size
from stages.report.markup import Markup, el

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.1rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
td { border-top: 1px solid color-mix(in srgb, currentColor 18%, transparent); padding: .15rem 0; }
td + td { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; opacity: .7; }
td:first-child { overflow-wrap: anywhere; }
.kept { opacity: .6; }
"""


def listing(
    url: str, name: str, folders: Sequence[str], files: Mapping[str, int], shown: Sequence[str]
) -> bytes:
    """The page of a folder.

    url: of the root; name: of the folder below it, empty for the root itself; files: name to bytes;
    shown: those of them that have a link."""
    up = [_row("../", "../", "")] if name else []
    rows = [_row(f"{one}/", f"./{quote(one, safe='')}/", "") for one in folders]
    for one, num_bytes in files.items():
        link = f"./{quote(one, safe='')}" if one in shown else ""
        rows.append(_row(one, link, size(num_bytes)))
    empty = el("p", "Nothing lies here yet.")
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", name or url),
        el("style", Markup(STYLE)),
    )
    title = el("h1", f"{url}/{name}" if name else url)
    body = el("body", title, el("table", *up, *rows), None if rows else empty)
    return ("<!doctype html>\n" + el("html", head, body, lang="en") + "\n").encode()


def _row(text: str, link: str, told: str) -> Markup:
    what = el("a", text, href=link) if link else el("span", text, class_="kept")
    return el("tr", el("td", what), el("td", told))
