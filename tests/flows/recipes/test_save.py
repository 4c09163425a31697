"""Checkpoints may go elsewhere than below the root; all stages that read them follow."""

from __future__ import annotations

import pytest

from flows.recipes.pretrain import pretrain_jobs
from flows.recipes.recipe import parse_recipe
from flows.recipes.release import release_jobs
from tests.flows.recipes.test_recipe import TINY, jobs
from trainyard.artifacts.output import Output
from trainyard.errors import ConfigError


def test_every_stage_reads_the_checkpoints_from_where_they_are_saved() -> None:
    recipe = parse_recipe(TINY, "recipes/tiny.toml", "/y")
    moved = recipe.with_options({"pretrain": {"save": "s3://b/run/"}})
    own, every = pretrain_jobs(recipe), pretrain_jobs(moved)
    assert own.pretrain.document["save"] == "/y/tiny/checkpoint"
    read = [every.reshard.document["load_dir"], every.export.document["load_dir"]]
    assert [*read, every.report.document["checkpoint"]] == ["s3://b/run"] * 3
    assert every.pretrain.output == Output.directory("s3://b/run")
    assert every.export.output == own.export.output
    after = [every.reshard, every.export, every.evaluate, every.benchmark]
    released = release_jobs(moved)
    assert [released.reshard, released.export, released.evaluate, released.benchmark] == after


def test_another_run_in_a_chosen_folder_is_not_replaced() -> None:
    """Where --save holds another model or other data, the stage refuses without --new-run."""
    assert jobs().pretrain.document["new_run"] is True
    chosen = jobs(TINY.replace("[pretrain]", '[pretrain]\nsave = "/elsewhere"'))
    assert "new_run" not in chosen.pretrain.document


@pytest.mark.parametrize("save", ["/y/tiny", "/y/tiny/", "/y"])
def test_checkpoints_do_not_go_where_all_else_lies(save: str) -> None:
    with pytest.raises(ConfigError, match=r"^recipes/tiny.toml \[pretrain\] save .* of its own"):
        jobs(TINY.replace("[pretrain]", f'[pretrain]\nsave = "{save}"'))
