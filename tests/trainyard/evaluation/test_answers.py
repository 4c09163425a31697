"""Exact match and F1, against the steps of Megatron-LM's evaluate.py and metrics.py by hand."""

from __future__ import annotations

import pytest

from trainyard.datasets.fine_tuning.questions import Question
from trainyard.evaluation.answers import TokenScores, exact_match, token_scores
from trainyard.evaluation.questions import row_of, summarize


@pytest.mark.parametrize(
    ("prediction", "answers", "is_match"),
    [
        ("The Eiffel-Tower.", ["eiffeltower"], True),  # punctuation is removed, not a space
        ("Answer: an apple", ["Apple"], True),
        ("A: Paris<|endoftext|>", ["London", "paris"], True),
        ("Paris, France", ["Paris"], False),
        ("theatre", ["atre"], False),  # articles are words
        ("Paris", [], False),
    ],
)
def test_exact_match_forgives_case_punctuation_and_articles(
    prediction: str, answers: list[str], is_match: bool
) -> None:
    assert exact_match(prediction, answers) is is_match


@pytest.mark.parametrize(
    ("prediction", "answer", "scores"),
    [
        ("the Eiffel-Tower", "Eiffel Tower", (1.0, 1.0, 1.0)),  # punctuation becomes a space
        ("in Paris in", "Paris, in France", (2 / 3, 2 / 3, 2 / 3)),
        ("Rome", "Paris", (0.0, 0.0, 0.0)),
        ("", "Paris", (0.0, 0.0, 0.0)),
        ("Paris", "Paris Paris", (1.0, 0.5, 2 / 3)),
    ],
)
def test_f1_is_of_the_words_that_both_have(
    prediction: str, answer: str, scores: tuple[float, float, float]
) -> None:
    assert token_scores(prediction, answer) == pytest.approx(TokenScores(*scores))


def test_empty_answers_take_no_part_in_f1() -> None:
    asked = [
        Question("a?", (), ("Paris", "Lutetia")),
        Question("b?", (), ("",)),
        Question("c?", (), ("no_passages_used",)),
        Question("d?", (), ()),
    ]
    given = ["Lutetia", "x", "y", "z"]
    found = summarize([row_of(0, *pair) for pair in zip(asked, given, strict=True)]).numbers
    assert (found["num_questions"], found["num_scored"]) == (4, 1)
    assert found["exact_match"] == 0.25  # of every answer,
    assert found["f1"] == 0.0  # and of the first one alone
