"""Words that are encoded once: what remembers them, by itself."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy as np
import pytest

from trainyard.tokenizers.base import Flat, as_lists
from trainyard.tokenizers.fast import words
from trainyard.tokenizers.fast.words import WordCache

KNOWN = 50_000
MOST_BYTES = 50_000
"""Less than there are for each of the known words."""


def by_letters(several: Sequence[str]) -> Flat:
    """The code points of words are their ids."""
    bounds = np.cumsum([0, *map(len, several)])
    return np.array([ord(letter) for word in several for letter in word], np.uint32), bounds


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text if letter != " "]


def test_a_new_word_does_not_copy_those_that_are_known() -> None:
    cache = WordCache(str.split, by_letters)
    known = " ".join(map(str, range(KNOWN)))
    assert cache.lengths([known, "first new"]).tolist() == [len(known) - KNOWN + 1, 8]
    assert cache.lengths(["makes room"]).tolist() == [9]
    tracemalloc.start()
    try:
        assert as_lists(cache.encode(["7 second"])) == [letters("7second")]
        assert cache.lengths(["31 third"]).tolist() == [7]
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    assert as_lists(cache.encode([known, "third second"])) == [
        letters(known),
        letters("thirdsecond"),
    ]


def interrupted_at(line: int, cache: WordCache, texts: Sequence[str]) -> bool:
    """Whether a call was, after so many lines that it ran under its lock. Where `with` ends, an
    exception of a trace would keep the lock."""
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != words.__file__ or frame.f_code.co_name == "encode":
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        cache.encode(texts)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("most", [3, 100])
def test_an_interrupt_at_any_line_leaves_no_word_without_its_ids(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """With room for three words, what is known is forgotten, too."""
    monkeypatch.setattr(words, "MAX_WORDS", most)
    line, is_interrupted = 0, True
    while is_interrupted:
        cache = WordCache(str.split, by_letters)
        cache.encode(["a bc def", "ghij"])
        is_interrupted = interrupted_at(line, cache, ["bc klmno", "p def qr"])
        for text in ("st qr p", "a klmno bc u", "def ghij qr st"):
            assert as_lists(cache.encode([text])) == [letters(text)]
            assert cache.lengths([text]).tolist() == [len(letters(text))]
        line += 1
    assert line > len(["bc", "klmno", "p", "def", "qr"])
