"""What overrides a recipe: fields of a form, and a text whose names and types are checked."""

from __future__ import annotations

import pytest

from flows.recipes.overrides import (
    AS_RECIPE,
    DECIDED,
    KEYS_OF,
    STAGES_OF,
    TOP_LEVEL,
    parse_text,
    read_overrides,
)
from flows.recipes.recipe import parse_recipe
from flows.stage_configs import CONFIGS
from trainyard.config import leaves
from trainyard.errors import ConfigError

FLOW = "pretrain-gpt"


def read(text: str) -> dict[str, object]:
    return read_overrides(FLOW, text)


@pytest.mark.parametrize(
    "text",
    [
        'pretrain.lr = 2e-3\npretrain.lr_decay_style = "cosine"\ntokenize.append_eod = false',
        "pretrain.lr=2e-3\npretrain.lr_decay_style = cosine  # bare\n\ntokenize.append_eod= false",
        '[pretrain]\nlr = 2e-3\nlr_decay_style = "cosine"\n[tokenize]\nappend_eod = false\n',
        "# bare\n[pretrain]\nlr = 2e-3\nlr_decay_style = cosine\n[tokenize]\nappend_eod = false\n",
    ],
    ids=["dotted", "bare words", "tables", "tables with bare words"],
)
def test_toml_and_lines_say_the_same(text: str) -> None:
    wanted = {"lr": 2e-3, "lr_decay_style": "cosine"}
    assert read(text) == {"pretrain": wanted, "tokenize": {"append_eod": False}}


def test_keys_above_the_tables_and_lists() -> None:
    text = 'corpus = [\n  "a.jsonl",\n]\nevaluation_data = "b"\nbenchmark.prompts = ["x", "y"]'
    assert read(text) == {
        "corpus": ("a.jsonl",),
        "evaluation_data": "b",
        "benchmark": {"prompts": ["x", "y"]},
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pretrain.train_iter = 5", "overrides: pretrain: unknown key 'train_iter'; did you mean"),
        ("pretrian.lr = 1", "unknown stage or key 'pretrian'; did you mean 'pretrain'"),
        ("lr = 1", "lr is an option of pretrain: write pretrain.lr = VALUE"),
        ("verify.url = x", "this flow has no stage verify; stages: collect, "),
        ("pretrain = 5", r"pretrain is a stage: write pretrain.KEY = VALUE, not 5"),
        ("pretrain.lr = fast", "overrides: pretrain.lr must be a number, got 'fast'"),
        ("pretrain.train_iters = 1.5", "pretrain.train_iters must be a whole number, got 1.5"),
        ("tokenize.append_eod = True", "append_eod must be true or false, got 'True'"),
        ("pretrain.lr_decay_style = cosinus", "choose one of .*'cosine'"),
        ("pretrain.data_path = x", "data_path is decided by the flow; leave .* set tokens for"),
        ("pretrain.lr", "line 1, 'pretrain.lr', is not STAGE.KEY = VALUE"),
        ("pretrain.lr = 1\npretrain.lr = x", "pretrain.lr is given twice"),
        ("pretrain.x = 1\npretrain = x\n", "pretrain is given twice"),
        ("benchmark.prompts = ['a', b]", "line 1: the value is not valid TOML: "),
        ("corpus = a.jsonl", "corpus must be a list, got 'a.jsonl'"),
    ],
)
def test_a_mistake_is_named_with_what_to_write(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(text)


def test_a_flow_takes_options_of_its_own_stages_only() -> None:
    with pytest.raises(ConfigError, match="this flow has no stage pretrain; stages: reshard, "):
        read_overrides("release", "pretrain.lr = 1")
    with pytest.raises(ConfigError, match="unknown stage or key 'tokens'"):
        read_overrides("release", "tokens = 'x'")


def test_a_field_that_is_left_empty_overrides_nothing() -> None:
    empty = {"train_iters": None, "load": "", "bf16": AS_RECIPE}
    assert read_overrides(FLOW, None, tokens=None, pretrain=empty) == {}
    filled = {"train_iters": 0, "bf16": False, "lr": None}
    found = read_overrides(FLOW, "", tokens="t", pretrain=filled)
    assert found == {"tokens": "t", "pretrain": {"train_iters": 0, "bf16": False}}


def test_a_field_and_the_text_do_not_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match=r"pretrain.lr is given twice: as lr, and in overrides"):
        read_overrides(FLOW, "pretrain.lr = 1", pretrain={"lr": 2.0})
    found = read_overrides(FLOW, "pretrain.lr = 1", pretrain={"seed": 2})
    assert found == {"pretrain": {"lr": 1.0, "seed": 2}}


def test_what_a_recipe_writes_by_another_name_is_overridden() -> None:
    recipe = parse_recipe("[tokenize]\nappend_eod = true\nworkers = 2\n", "r.toml", "/y")
    found = recipe.with_options({"tokenize": {"workers": 3}, "tokens": "t"})
    assert found.table("tokenize") == {"append_eod": True, "workers": 3}
    assert found.tokens == "t"


def test_every_option_that_flows_decide_exists() -> None:
    assert STAGES_OF.keys() == KEYS_OF.keys()
    assert {key for keys in KEYS_OF.values() for key in keys} == set(TOP_LEVEL)
    for stage, names in DECIDED.items():
        assert set(names) <= {name for name, _, _ in leaves(CONFIGS[stage])}


def test_options_of_one_stage_are_lines_without_its_name() -> None:
    assert parse_text("workers = 2\ntokenizer_type = NullTokenizer", "options") == {
        "workers": 2,
        "tokenizer_type": "NullTokenizer",
    }
