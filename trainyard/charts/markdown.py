"""Text of others in Markdown: shown as it is, never as a link, an image, HTML or other code."""

from __future__ import annotations

import re

from trainyard.logging import one_line, printable

SPECIAL = re.compile(r"[\\`*_\[\]<>|!~&$@]|(?<=:)/(?=/)|(?<=www)\.", re.IGNORECASE)
"""What begins something, also the links that GitHub's dialect finds in plain text."""

TICKS = re.compile("`+")


def escape(text: str) -> str:
    """The text on one line, for the middle of a paragraph or a cell of a table."""
    return SPECIAL.sub(lambda found: "\\" + found[0], _on_one_line(text))


def code(text: str) -> str:
    """The text on one line as code, for a paragraph or a cell of a table; empty for none."""
    line = _on_one_line(text).replace("|", "\\|")
    if not line:
        return ""
    fence = "`" * (_longest(line) + 1)
    pad = " " if line[0] in "` " or line[-1] in "` " else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def code_block(text: str, language: str) -> str:
    """Lines of code."""
    fence = "`" * max(3, _longest(text) + 1)
    return f"{fence}{language}\n{printable(text).rstrip()}\n{fence}\n"


def _on_one_line(text: str) -> str:
    return one_line(" ".join(text.splitlines()))


def _longest(text: str) -> int:
    return max(map(len, TICKS.findall(text)), default=0)
