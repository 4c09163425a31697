"""The text of an output in pieces: joined, they are what the whole decodes to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.serving.text_stream import TextStream

STOP = 256
WORDS = ("\n\n", "end", "\xe4nde")


def decode(tokens: Sequence[int]) -> str:
    """Tokens are bytes; the last one of all ends a text."""
    return bytes(t for t in tokens if t != STOP).decode(errors="replace")


def stripping(tokens: Sequence[int]) -> str:
    """As SentencePiece does with the space before the first word."""
    return decode(tokens).removeprefix(" ")


def pieces_of(
    tokens: Sequence[int], words: Sequence[str] = (), cuts: Sequence[int] = (), reason: str = ""
) -> list[str]:
    """cuts: where pieces begin; of single tokens if there are none."""
    stream = TextStream(decode, b"abc", stop_ids=frozenset({STOP}), stop_words=words)
    bounds = sorted({0, len(tokens), *(cuts or range(len(tokens)))})
    spans = list(pairwise(bounds)) or [(0, 0)]
    return [
        stream.push(tokens[a:b], reason or "length" if b == len(tokens) else None)  # type: ignore
        for a, b in spans
    ]


@settings(max_examples=30, deadline=None)
@given(
    st.one_of(st.text(max_size=40).map(lambda t: t.encode()), st.binary(max_size=60)),
    st.lists(st.integers(1, 59), max_size=6),
)
def test_pieces_joined_are_the_whole_text(data: bytes, cuts: list[int]) -> None:
    cuts = [cut for cut in cuts if cut < len(data)]
    assert "".join(pieces_of(list(data), cuts=cuts)) == decode(list(data))


@settings(max_examples=20, deadline=None)
@given(st.text(max_size=30))
def test_no_piece_of_a_text_has_a_part_of_a_character(text: str) -> None:
    pieces = pieces_of(list(text.encode()))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in pieces)


@settings(max_examples=30, deadline=None)
@given(st.text(st.sampled_from("e\xe4and\n x"), max_size=25), st.sampled_from(WORDS))
def test_a_stop_word_and_its_beginnings_are_never_given_out(text: str, word: str) -> None:
    text = text.replace(word, "") + word
    if text.index(word) != len(text) - len(word):
        return  # the rest made one more
    pieces = pieces_of(list(text.encode()), [word], reason="stop")
    assert "".join(pieces) == text[: -len(word)]


def test_what_only_looks_like_a_stop_word_comes_late_but_comes() -> None:
    assert pieces_of(list(b"an enemy"), ["end"]) == ["a", "n", " ", "", "", "en", "em", "y"]


def test_the_token_that_ends_a_text_is_left_out() -> None:
    assert pieces_of([*b"ab", STOP], reason="stop") == ["a", "b", ""]


def test_a_character_that_is_cut_short_is_shown_at_the_end() -> None:
    assert pieces_of(list("\xe9".encode()[:1])) == ["\ufffd"]


@pytest.mark.parametrize("count", [1, 5, 40])
def test_a_space_that_the_tokenizer_strips_from_a_text_stays_within_it(count: int) -> None:
    stream = TextStream(stripping, list(b"so"))
    text = "".join(stream.push([t], None) for t in b" it is" * count)
    assert text == " it is" * count


def test_a_character_that_the_prompt_began_belongs_to_the_output() -> None:
    first, second = "\xe9".encode()
    stream = TextStream(decode, [first])
    assert stream.push([second], None) == "\xe9"
