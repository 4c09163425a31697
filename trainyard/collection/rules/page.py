"""What a rule gets, and what it answers.

Knows nothing of files, or of any single rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple


class Page:
    """A text, and what several rules need to know of it, computed once."""

    def __init__(self, text: str, count_tokens: Callable[[str], int] | None = None) -> None:
        self.text = text
        self._count_tokens = count_tokens

    @cached_property
    def lines(self) -> list[str]:
        """The lines, without those that are blank."""
        return [line for line in self.text.split("\n") if line and not line.isspace()]

    @cached_property
    def words(self) -> list[str]:
        """What whitespace separates."""
        return self.text.split()

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of the text by the tokenizer that was given."""
        assert self._count_tokens is not None, "a rule counts tokens, and no tokenizer was built"
        return self._count_tokens(self.text)

    def with_text(self, text: str) -> Page:
        """The page of another text."""
        return Page(text, self._count_tokens)


class Drop(NamedTuple):
    """The answer of a rule that drops the document."""

    why: str
    """What was measured, such as "32 words"."""


class Edit(NamedTuple):
    """The answer of a rule that changes the text."""

    text: str
    removed: tuple[str, ...] = ()
    """Lines that were removed whole."""


Verdict = Drop | Edit | None
"""What a rule says of a page; None: it stays as it is."""


def edited(page: Page, text: str) -> Verdict:
    """The verdict of a rule that made `text` of a page."""
    return None if text == page.text else Edit(text)
