"""Runs of one recipe differ in their names by what they override, and by their time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from types import SimpleNamespace

import pytest

from flows.recipes.overrides import AS_RECIPE
from flows.runner import run_name
from flows.runner.run_name import add_reason, recipe_name
from trainyard.errors import ConfigError

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


def test_the_name_of_a_failed_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    named: dict[str, str] = {}

    async def update_flow_run(run: str, name: str) -> None:
        named[run] = name

    @asynccontextmanager
    async def get_client() -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(update_flow_run=update_flow_run)

    context = SimpleNamespace(flow_run=SimpleNamespace(id="7", name="quickstart 11-23 17:05"))
    monkeypatch.setattr(run_name, "get_client", get_client)
    monkeypatch.setattr(run_name.FlowRunContext, "get", lambda: context)
    asyncio.run(add_reason(ConfigError("--lr must be positive,\ngot -1")))
    assert named == {"7": "quickstart 11-23 17:05: --lr must be positive, got -1"}
    asyncio.run(add_reason(ConfigError("x" * 500)))
    assert len(named["7"]) < 200
