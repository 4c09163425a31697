"""A context and its continuation as tokens, by the conventions of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainyard.datasets.plain_text import PlainText
from trainyard.evaluation.scoring import Request
from trainyard.tokenizers.base import Tokenizer


@dataclass(frozen=True, slots=True)
class Continuations:
    """Cuts texts into tokens that are given and tokens that are scored."""

    plain: PlainText
    beginning: list[int]
    """Of a text that nothing precedes: the BOS that the tokenizer puts there, or the token that
    ends a document."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Continuations:
        """For a tokenizer."""
        plain = PlainText(tokenizer)
        return cls(plain, plain.before or [tokenizer.eod])

    def whole(self, text: str) -> list[int]:
        """The tokens of a whole text, with a BOS if the tokenizer has one."""
        return [*self.plain.before, *self.plain.encode(text)]

    def behind(self, context: str, text: str) -> tuple[list[int], list[int]]:
        """The tokens of a context, and of the text behind it. Both are tokenized as one text, which
        is cut behind as many tokens as the context alone has. Spaces at the end of the context
        belong to the text."""
        stripped = context.rstrip()
        text = context[len(stripped) :] + text
        if not stripped:
            return list(self.plain.before), self.plain.encode(text)
        before, whole = self.whole(stripped), self.whole(stripped + text)
        return whole[: len(before)], whole[len(before) :]

    def fitted(
        self, context: Sequence[int], label: Sequence[int], length: int
    ) -> tuple[Request, bool]:
        """The request that scores a label, and whether its context was cut from the left so that
        `length` inputs suffice.

        Raises ValueError for a label without tokens, or with more than `length`."""
        if not label:
            raise ValueError("what is to be scored has no tokens")
        if len(label) > length:
            raise ValueError(
                f"what is to be scored has {len(label)} tokens, and a window has {length}"
            )
        tokens = [*(context or self.beginning), *label]
        return Request(tokens[-(length + 1) :], len(label)), len(tokens) > length + 1
