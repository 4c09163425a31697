"""The measures of RealToxicityPrompts, by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from trainyard.classifiers.toxicity import (
    PROMPT,
    Prompts,
    Scores,
    key_of,
    lowest,
    of_prompts,
    summarize,
)

CONTINUED: dict[str, list[float | None]] = {
    "a": [0.1, 0.9, None],
    "b": [0.2, 0.3, 0.4],
    "c": [None, None, None],
}


def array(scores: Sequence[float | None]) -> Scores:
    """None, of an empty text, is NaN."""
    return np.array(scores, np.float64)


def continued() -> tuple[Prompts, Scores]:
    """The continuations one after another, one of each prompt at a time, and a text without one."""
    keys = [b"", *[key_of(prompt) for _ in range(3) for prompt in CONTINUED]]
    scores = [1.0, *[some[i] for i in range(3) for some in CONTINUED.values()]]
    return np.array(keys, PROMPT), array(scores)


def by_key(toxicity: dict[str, float]) -> dict[bytes, float]:
    return {key_of(prompt): value for prompt, value in toxicity.items()}


def test_maxima_are_averaged_over_prompts() -> None:
    found = of_prompts(*continued(), by_key({"a": 0.7, "b": 0.5, "c": 0.1, "other": 0.9}))
    assert found is not None
    assert found["continuations"] == [3, 3]
    assert found["all"] == {
        "prompts": 3,
        "expected_maximum": pytest.approx((0.9 + 0.4 + 0.0) / 3),
        "expected_maximum_std": pytest.approx(0.36818, abs=1e-5),
        "probability": pytest.approx(1 / 3),
    }
    assert found["toxic"]["prompts"] == 2
    assert found["toxic"]["expected_maximum"] == pytest.approx(0.65)
    assert found["nontoxic"] == {
        **{"prompts": 1, "expected_maximum": 0.0},
        **{"expected_maximum_std": 0.0, "probability": 0.0},
    }


def test_a_prompt_of_unknown_toxicity_counts_among_all_alone() -> None:
    found = of_prompts(*continued(), {})
    assert found is not None
    assert (found["toxic"], found["nontoxic"]) == ({"prompts": 0}, {"prompts": 0})


def test_texts_that_continue_nothing_have_no_such_measure() -> None:
    assert of_prompts(np.array([b"", b""], PROMPT), array([0.1, None]), {}) is None


def test_half_a_character_has_a_key_too() -> None:
    assert key_of("a \ud83d") != key_of("a ")


def test_texts_without_a_score_are_no_part_of_the_mean() -> None:
    found = summarize(array([0.0, 1.0, None, 0.5]))
    assert found == {
        **{"documents": 4, "scored": 3, "mean": 0.5, "max": 1.0},
        **{"std": pytest.approx(0.40825, abs=1e-5), "toxic_share": pytest.approx(2 / 3)},
    }
    assert summarize(array([None])) == {"documents": 1, "scored": 0}


def kept(scores: Sequence[float | None], fraction: float) -> list[int]:
    return np.flatnonzero(lowest(array(scores), fraction)).tolist()


def test_half_of_all_documents_stay_as_in_megatron_lm() -> None:
    """`samples_left = len(lines) // 2` of filter-selfgeneration.py counts empty texts too."""
    assert kept([0.5, None, 0.1, 0.4, None], 0.5) == [2, 3]
    assert kept([0.2, 0.1, 0.1, 0.1], 0.5) == [1, 2]
    assert kept([None, None, None, 0.1], 0.5) == [3]


def test_a_fraction_is_the_decimal_that_it_is_written_as() -> None:
    """In binary, 0.29 * 100 is 28.999999999999996."""
    scores = [n / 200 for n in range(100)]
    assert all(len(kept(scores, percent / 100)) == percent for percent in range(1, 100))
    assert kept(scores[:3], 1 / 3) == []
