"""Elements of HTML and SVG as text. All text is escaped unless it is `Markup`."""

from __future__ import annotations

import html
from collections.abc import Iterable

from trainyard import logging

VOID = frozenset({"meta", "br", "hr", "line", "rect", "path", "circle"})

KEPT = (
    "\n\t\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u200c\u200d\u202f\u205f\u3000"
)
"""Spaces, and the joiners that Persian, Hindi and emoji need; they reorder nothing."""


class Markup(str):
    """Text that is already escaped."""

    __slots__ = ()

    def __html__(self) -> str:
        """What Jinja inserts without escaping it again."""
        return str(self)


Child = Markup | str | int | float | None


def printable(text: str) -> str:
    """The text with escapes for what HTML does not allow, UTF-8 cannot encode, and for marks that
    reorder or hide what stands beside them."""
    return logging.printable(text, KEPT)


def join(parts: Iterable[Child]) -> Markup:
    """Parts one after the other, escaped; None is left out."""
    return Markup("".join(_escape(part) for part in parts))


def element(name: str, /, *children: Child, **attributes: Child) -> Markup:
    """An element. `class_` means class and `stroke_width` stroke-width; None leaves it out."""
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID and not children:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def _escape(value: Child) -> str:
    if value is None or isinstance(value, Markup):
        return value or ""
    return html.escape(printable(str(value)))


def _attribute(key: str, value: Child) -> str:
    if value is None:
        return ""
    name = key.rstrip("_").replace("_", "-")
    shown = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
    return f' {name}="{_escape(shown)}"'
