"""Guesses of the next tokens of a text from the text itself (prompt lookup, n-gram speculation).

Where the last tokens occurred before, what followed there may follow again. The model computes the
guesses together with the last token, and those that it would have chosen are kept, so a guess
changes the speed and never the text. No torch."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST, SHORTEST = 3, 1
"""Tokens that have to occur again, the longest run first."""


class NGrams:
    """Where each run of tokens of a text last ended, kept up as the text grows."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._known = 0

    def guess(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Up to `most` tokens that may follow. tokens: the text, which only ever grows."""
        for end in range(max(self._known, 1), len(tokens)):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self._ends[tuple(tokens[end - length : end])] = end
        self._known = max(self._known, len(tokens))
        for length in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
            if (found := self._ends.get(tuple(tokens[-length:]))) is not None:
                return _continued(tokens, found, most)
        return ()


def _continued(tokens: Sequence[int], begin: int, count: int) -> tuple[int, ...]:
    """The tokens from `begin` on; those behind the end repeat the ones before it."""
    out: list[int] = []
    for place in range(begin, begin + count):
        out.append(tokens[place] if place < len(tokens) else out[place - len(tokens)])
    return tuple(out)
