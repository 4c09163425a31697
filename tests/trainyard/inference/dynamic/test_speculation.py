"""Guesses continue as the text did before."""

from __future__ import annotations

from trainyard.inference.dynamic.speculation import NGrams


def test_a_guess_is_what_followed_the_longest_run_that_occurred_before() -> None:
    text = [1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3]
    assert NGrams().guess(text, 2) == (4, 9), "1 2 3 and not the later 2 3"
    assert NGrams().guess([5, 6, 7], 3) == ()
    assert NGrams().guess([5], 3) == ()


def test_a_text_that_repeats_itself_is_guessed_to_go_on() -> None:
    assert NGrams().guess([1, 2, 1, 2, 1], 5) == (2, 1, 2, 1, 2)


def test_a_text_that_grows_is_guessed_as_one_that_is_whole() -> None:
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2, 3, 1]
    growing = NGrams()
    for length in range(1, len(text) + 1):
        assert growing.guess(text[:length], 4) == NGrams().guess(text[:length], 4)
