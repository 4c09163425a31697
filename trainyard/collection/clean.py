"""Applies rules to documents, in order, until one drops the document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trainyard.collection.documents import Item, dropped
from trainyard.collection.rules.build import Rule
from trainyard.collection.rules.page import Drop, Page
from trainyard.collection.tally import Tally

EMPTY = "empty"
"""The reason of documents without text, of which rules may have nothing to measure."""


class Cleaner:
    """Cleans documents and counts what each rule did."""

    def __init__(
        self,
        rules: Sequence[Rule],
        key: str,
        num_samples: int,
        count_tokens: Callable[[str], int] | None = None,
    ) -> None:
        self._rules, self._key, self._num_samples = rules, key, num_samples
        self._count_tokens = count_tokens
        self.tally = Tally.of([EMPTY, *(rule.written for rule in rules)])

    def clean(self, item: Item) -> tuple[dict[str, Any], bool]:
        """The document to write, and whether it is kept; a dropped one is unchanged."""
        tally, given = self.tally, str(item.fields[self._key])
        tally.documents += 1
        tally.chars += len(given)
        page = Page(given, self._count_tokens)
        for rule in self._rules:
            if not page.text or page.text.isspace():
                break
            verdict = rule.apply(page)
            if isinstance(verdict, Drop):
                return self._dropped(item, rule.written, verdict.why, page.text), False
            if verdict is not None:
                self._count_change(item, rule.written, page, verdict.text, verdict.removed)
                page = page.with_text(verdict.text)
        if not page.text or page.text.isspace():
            return self._dropped(item, EMPTY, "no text is left", given), False
        tally.kept += 1
        tally.kept_chars += len(page.text)
        item.fields[self._key] = page.text
        return item.fields, True

    def _dropped(self, item: Item, rule: str, why: str, text: str) -> dict[str, Any]:
        reason = self.tally.reasons[rule]
        reason.dropped += 1
        reason.dropped_chars += len(item.fields[self._key])
        reason.sample(self._num_samples, item.place, why, text)
        return dropped(item.fields, rule, why)

    def _count_change(
        self, item: Item, rule: str, page: Page, text: str, removed: tuple[str, ...]
    ) -> None:
        reason = self.tally.reasons[rule]
        reason.changed += 1
        reason.removed_lines += len(removed)
        reason.removed_chars += len(page.text) - len(text)
        if removed:
            reason.sample(self._num_samples, item.place, "a line removed", removed[0])
