"""Reads an HTML page as sections with text and rows, and checks that it is self-contained."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser


@dataclass
class Section:
    """What follows a heading."""

    title: str = ""
    text: str = ""
    rows: list[list[str]] = field(default_factory=list)
    """Of tables, and names and values of lists; one blank for any white space."""

    @property
    def facts(self) -> dict[str, str]:
        """The rows of two cells, the first of which names the second."""
        return {row[0]: row[1] for row in self.rows if len(row) == 2}


class Page(HTMLParser):
    """A page with its sections by title; the head of the page is the section ``."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self._sections = [Section()]
        self.feed(page)
        for section in self._sections:
            section.title, section.text = map(_plain, (section.title, section.text))
            section.rows = [[_plain(cell) for cell in row] for row in section.rows]
        self.sections = {section.title: section for section in self._sections}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self._sections.append(Section())
        section = self._sections[-1]
        section.text += " "
        if tag in ("tr", "dt"):
            section.rows.append([])
        if tag in ("th", "td", "dt", "dd"):
            section.rows[-1].append("")
        if tag not in ("meta", "br", "hr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"svg", "style"} & {*self.open}:
            return
        section = self._sections[-1]
        section.text += data
        if "h2" in self.open:
            section.title += data
        if {"th", "td", "dt", "dd"} & {*self.open}:
            section.rows[-1][-1] += data


def _plain(text: str) -> str:
    return " ".join(text.split())


def check_sound(page: str) -> Page:
    """Well-formed, nothing loaded from anywhere, no number that is none."""
    parsed = Page(page)
    check_tags(parsed)
    assert not re.search(r"https?:|url\(|@import", page)
    assert not re.search(r"\b(nan|NaN|inf|Infinity|None|undefined|Undefined)\b", page)
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    return parsed


def check_tags(parsed: Page) -> None:
    """Well-formed, no tag or attribute that loads or runs something, and relative links only."""
    assert parsed.open == []
    names = {tag for tag, _ in parsed.tags}
    assert not names & {"script", "link", "iframe", "img", "object", "embed", "use", "base"}
    for tag, attributes in parsed.tags:
        assert not {"src", "srcset", "data", "action"} & attributes.keys()
        link = attributes.get("href")
        assert link is None or (tag == "a" and not re.match("[a-zA-Z0-9+.-]*:|/", link))
        assert not any(name.startswith("on") for name in attributes)
