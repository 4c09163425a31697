"""Elements of HTML and SVG as text. Whatever is not Markup is escaped: by
construction, not by care."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

VOID = frozenset({"meta", "br", "hr", "line", "rect", "path", "circle", "use"})

UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""Control characters and halves of surrogate pairs: not allowed in HTML, not encodable."""


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Child = Markup | str | int | float | None


def escape(value: Child) -> Markup:
    """Any value as markup that shows it; None is nothing."""
    if isinstance(value, Markup):
        return value
    if value is None:
        return Markup("")
    return Markup(html.escape(UNPRINTABLE.sub("\ufffd", str(value)), quote=True))


def join(parts: Iterable[Child], between: str = "") -> Markup:
    """Parts one after the other."""
    return Markup(between.join(escape(part) for part in parts))


def el(name: str, /, *children: Child, **attributes: Child | bool) -> Markup:
    """An element. `class_` is class, `stroke_width` is stroke-width; None and False leave out."""
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID and not children:
        return Markup(f"<{name}{written}{'/' if name not in ('meta', 'br', 'hr') else ''}>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def _attribute(key: str, value: Child | bool) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    shown = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
    return f' {name}="{escape(shown)}"'
