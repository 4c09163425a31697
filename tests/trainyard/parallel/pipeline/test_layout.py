"""The language of --pipeline-model-parallel-layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainyard.errors import ConfigError
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.mtp_config import MTPConfig
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.pipeline.layout import check_layout, count_predicting, parse_layout


def signs(text: str) -> str:
    """The unrolled layout."""
    return "|".join("".join(item.sign for item in stage) for stage in parse_layout(text))


@pytest.mark.parametrize(
    ("text", "unrolled"),
    [
        ("Et|tL", "Et|tL"),
        ("E|(t|)*3,m|m||L", "E|t|t|t|m|m||L"),
        ("Ettt|(tt|)*3,m|L", "Ettt|tt|tt|tt|m|L"),
        ("Et*3|t*2L", "Ettt|ttL"),
        ("E t, t |, tL", "Ett|tL"),
        ("E((t|)*2t|)*2L", "Et|t|t|t|t|t|L"),
        ("(E|)L", "E|L"),
        ("Et|*3tL", "Et|||tL"),
        ("E(t|)*0L", "EL"),
    ],
)
def test_repetition_groups_and_commas_unroll(text: str, unrolled: str) -> None:
    assert signs(text) == unrolled


@pytest.mark.parametrize(
    ("text", "num_layers", "place", "what"),
    [
        ("Et|xL", 1, 4, "'x' means nothing here; known are E the embedding, t a transformer"),
        ("Et|tl", 1, 5, "'l' means nothing"),
        ("E(t|L", 1, 2, r"this \( is not closed"),
        ("Et)L", 1, 3, r"this \) closes nothing"),
        ("Et*|L", 1, 3, r"\* needs a number behind it"),
        ("*3L", 1, 1, r"nothing before \* to repeat"),
        ("Et*9999999|L", 1, 10, "more than 100000 layers"),
        ("Et|m|L", 1, 4, "m must stand on the last stage, between its layers and L"),
        ("Et|tmtL", 3, 5, "m must stand on the last stage"),
        ("tt|L", 2, 5, "there is no E, the embedding"),
        ("Et|t", 2, 5, "there is no L"),
        ("Et|EtL", 2, 4, "a second E"),
        ("Et|tLL", 2, 6, "a second L"),
        ("tE|tL", 2, 1, "the first layer must be E"),
        ("Et|Lt", 2, 5, "the last layer must be L"),
        ("|Et|tL", 2, 1, "the first stage must hold E"),
        ("Et|tL|", 2, 7, "the last stage must hold L"),
        ("", 1, 1, "there is no E"),
    ],
)
def test_a_fault_is_shown_at_its_place(text: str, num_layers: int, place: int, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        check_layout(text, parse_layout(text), num_layers)
    first, line, mark = str(caught.value).split("\n")
    assert first.startswith(f"--pipeline-model-parallel-layout, character {place}: ")
    assert line == f"    {text}"
    assert mark.index("^") == 4 + place - 1


def test_layers_of_multi_token_prediction_stand_before_the_loss() -> None:
    check_layout("Et|tmmL", parse_layout("Et|tmmL"), 2)
    assert count_predicting("Et|t(m)*2L") == 2
    parallel = ParallelConfig(
        pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|tmL"
    )
    model = GPTConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        seq_length=8,
        position_embedding_type="rope",
    )
    replace(model, prediction=MTPConfig(mtp_num_layers=1)).check_parallel(parallel)
    with pytest.raises(ConfigError, match=r"has 1 layers of .* \(m\), --mtp-num-layers is not set"):
        model.check_parallel(parallel)


def test_layers_must_be_as_many_as_the_model_has() -> None:
    with pytest.raises(ConfigError, match=r"has 3 transformer layers \(t\), --num-layers is 4"):
        check_layout("Et|ttL", parse_layout("Et|ttL"), 4)
