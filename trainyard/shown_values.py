"""Values of documents in messages. Standard library only."""

from __future__ import annotations

import re
import reprlib
from typing import Any


class _Short(reprlib.Repr):
    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(_without_secrets(x), level)


def _without_secrets(text: str) -> str:
    """The text without what follows `://` in a word that may have a password or a query."""
    words = re.split(r"([\s\"'<>])", text)
    return "".join(
        f"{word.partition('://')[0]}://..." if "://" in word and re.search("[@?#]", word) else word
        for word in words
    )


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200


def shown(value: Any) -> str:
    """A value of a document in a message, cut to a few hundred characters, and without passwords in
    URLs."""
    return _SHORT.repr(value)
