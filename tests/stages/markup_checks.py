"""Whether a page is well-formed and needs nothing but itself."""

from __future__ import annotations

import re
from html.parser import HTMLParser


class Elements(HTMLParser):
    """Every start tag with its attributes, and whether all that was opened is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "hr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_sound(page: str) -> Elements:
    """Well formed, nothing loaded from anywhere, nothing that is not a number."""
    elements = Elements(page)
    assert elements.open == []
    names = {tag for tag, _ in elements.tags}
    assert not names & {"script", "link", "iframe", "img", "object", "embed", "use", "base"}
    for _, attributes in elements.tags:
        assert not {"href", "src", "srcset", "data", "action"} & attributes.keys()
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"https?:|url\(|@import", page)
    assert not re.search(r"\b(nan|NaN|inf|Infinity|None|undefined)\b", page)
    ids = [attributes["id"] for _, attributes in elements.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    return elements
