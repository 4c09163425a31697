"""The stages that a flow run is told to force."""

from __future__ import annotations

import pytest

from flows.recipes.force import forced_names
from flows.recipes.pretrain import pretrain_jobs
from flows.recipes.recipe import parse_recipe
from tests.flows.recipes.test_recipe import TINY
from trainyard.errors import ConfigError

JOBS = pretrain_jobs(parse_recipe(TINY, "tiny.toml", "/y")).all()


def test_stages_and_jobs_are_forced_by_name() -> None:
    assert forced_names(None, JOBS) == forced_names(" ", JOBS) == frozenset()
    assert forced_names("pretrain, export evaluate", JOBS) == {"pretrain", "export", "evaluate"}
    assert forced_names("all", JOBS) == {"all"}


@pytest.mark.parametrize(
    ("name", "hint"),
    [("pretain", "did you mean 'pretrain'"), ("x", "stages: all, plan, collect, train_tok")],
)
def test_a_stage_that_the_flow_does_not_run_is_refused(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"force: this flow runs no stage '{name}'; {hint}"):
        forced_names(name, JOBS)
