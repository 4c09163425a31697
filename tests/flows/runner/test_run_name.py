"""Runs of one recipe differ in their names by what they override, and by their time."""

from __future__ import annotations

from datetime import datetime

import pytest

from flows.recipes.overrides import AS_RECIPE
from flows.runner.run_name import recipe_name

DUE = datetime(2026, 11, 23, 17, 5).astimezone()


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "quickstart 11-23 17:05"),
        ({"lr": None, "bf16": AS_RECIPE, "yard": "y"}, "quickstart 11-23 17:05"),
        ({"lr": 2e-3, "bf16": True}, "quickstart lr=0.002 bf16=true 11-23 17:05"),
        ({"overrides": "pretrain.lr = 1\ntokens = a"}, "quickstart pretrain.lr=1 tokens=a 11-23"),
        ({"overrides": "what"}, "quickstart overrides=? 11-23"),
        ({"load": "https://h/a?token=secret"}, "quickstart load=https://.../a 11-23"),
        (dict.fromkeys("abcde", 1), "quickstart a=1 b=1 c=1 +2 11-23"),
        ({"load": "s3://bucket/" + "x" * 90 + "/iter_0000002"}, "quickstart load=...xxx"),
    ],
)
def test_a_run_is_named_after_its_recipe_and_what_it_changes(
    given: dict[str, object], name: str
) -> None:
    shown = recipe_name({"recipe": "s3://bucket/recipes/quickstart.toml", **given}, DUE)
    assert shown.startswith(name)
    assert len(shown) < 60
