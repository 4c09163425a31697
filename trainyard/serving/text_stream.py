"""The text of an output, piece by piece, as its tokens come.

A character whose bytes are in several tokens waits for the last of them, and what may begin a stop
word waits until it is none. The pieces joined are the whole text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainyard.inference.request import FinishReason
from trainyard.inference.stop_words import INCOMPLETE, find_stop

CONTEXT_TOKENS = 8
"""Tokens before the new ones that are decoded again: a character has at most 4, and a tokenizer may
strip or add a space at the beginning of a text."""
INCOMPLETE_CHARS = 3
"""Most replacement characters that the first bytes of one character decode to."""


class TextStream:
    """The text of one output."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt: Sequence[int],
        *,
        stop_ids: frozenset[int] = frozenset(),
        stop_words: Sequence[str] = (),
    ) -> None:
        """prompt: the tokens that the text follows. stop_ids: end the output and are left out, as
        the first of `stop_words` that the last token completed."""
        self._decode, self._stop_ids, self._stop_words = decode, stop_ids, tuple(stop_words)
        self.text = ""
        """All that was given so far."""
        self._held = ""
        """Complete characters that may belong to a stop word."""
        self._window = list(prompt[-CONTEXT_TOKENS:])
        """Context and new tokens."""
        self._known = _complete(decode(self._window))
        """Characters of the window's text that were already returned."""

    @property
    def length(self) -> int:
        """Complete characters so far."""
        return len(self.text) + len(self._held)

    def push(self, tokens: Sequence[int], finish_reason: FinishReason | None) -> str:
        """The text that these next tokens complete."""
        if finish_reason == "stop" and tokens and tokens[-1] in self._stop_ids:
            tokens = tokens[:-1]
            finish_reason = "length"  # there is no stop word to cut
        if finish_reason == "stop" and len(tokens) > 1:
            # The last token completed the stop word that counts: `min_tokens` may have let others
            # pass before it.
            return self.push(tokens[:-1], None) + self.push(tokens[-1:], finish_reason)
        before = self.length
        self._held += self._completed(tokens, is_last=finish_reason is not None)
        ready = len(self._held)
        if finish_reason is None:
            ready -= self._may_begin_a_stop_word() if self._stop_words else 0
        elif finish_reason == "stop":
            begin = find_stop(self.text + self._held, before, self._stop_words)
            ready = ready if begin is None else begin - len(self.text)
        piece, self._held = self._held[:ready], self._held[ready:]
        self.text += piece
        return piece

    def _completed(self, tokens: Sequence[int], *, is_last: bool) -> str:
        """The characters whose last byte is in these tokens; at the end also what is cut short."""
        self._window += tokens
        text = self._decode(self._window)
        complete = len(text) if is_last else _complete(text)
        new = text[self._known : complete]
        self._known = max(self._known, complete)
        if len(self._window) > 2 * CONTEXT_TOKENS:
            del self._window[:-CONTEXT_TOKENS]
            self._known = len(self._decode(self._window)) - (len(text) - self._known)
        return new

    def _may_begin_a_stop_word(self) -> int:
        """Length of the longest suffix of the pending text that is a prefix of a stop word."""
        longest = max(map(len, self._stop_words), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(word.startswith(self._held[-length:]) for word in self._stop_words):
                return length
        return 0


def _complete(text: str) -> int:
    """Length of a text without the first bytes of a character at its end."""
    if not text.endswith(INCOMPLETE):
        return len(text)
    return max(len(text.rstrip(INCOMPLETE)), len(text) - INCOMPLETE_CHARS)
