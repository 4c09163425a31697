"""A folder as a page: its contents by name and size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import quote

from trainyard.charts.markup import Markup, element
from trainyard.charts.numbers import size

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
    shown: the files that get a link."""
    up = [_row("../", "../", "")] if name else []
    rows = [_row(f"{one}/", f"./{quote(one, safe='')}/", "") for one in folders]
    for one, num_bytes in files.items():
        link = f"./{quote(one, safe='')}" if one in shown else ""
        rows.append(_row(one, link, size(num_bytes)))
    empty = element("p", "This folder is empty.")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", name or url),
        element("style", Markup(STYLE)),
    )
    title = element("h1", f"{url}/{name}" if name else url)
    body = element("body", title, element("table", *up, *rows), None if rows else empty)
    return ("<!doctype html>\n" + element("html", head, body, lang="en") + "\n").encode()


def _row(text: str, link: str, size_text: str) -> Markup:
    what = element("a", text, href=link) if link else element("span", text, class_="kept")
    return element("tr", element("td", what), element("td", size_text))
