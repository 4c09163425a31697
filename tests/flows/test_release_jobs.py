"""A release is refused where there is nothing to release."""

from __future__ import annotations

import pytest

from flows.recipe import Recipe, parse_recipe
from flows.release_jobs import check_release, release_jobs
from trainyard.artifacts import store
from trainyard.errors import ConfigError

RECIPE = '[reshard]\n[evaluate]\ntask = "WIKITEXT103"\n[benchmark]\nprompts = ["The"]\n'


@pytest.fixture
def recipe(store_url: str) -> Recipe:
    return parse_recipe(RECIPE, "recipes/tiny.toml", store_url)


def publish(folder: str) -> None:
    store.write_bytes(f"{folder}/index.json", b"{}")
    store.write_bytes(f"{folder}/manifest.json", b"{}")


def test_what_is_there_may_be_released(recipe: Recipe) -> None:
    run, step = recipe.at("checkpoint"), recipe.at("checkpoint", "iter_0000002")
    publish(step)
    for named in (None, run, f"{run}/", step, f"{step}/"):
        assert check_release(recipe, named) == release_jobs(recipe, named)


def test_a_recipe_without_a_checkpoint_is_told_to_train(recipe: Recipe) -> None:
    store.write_bytes(recipe.at("checkpoint", ".claim.json"), b"{}")  # of a training that begins
    with pytest.raises(ConfigError, match=r"tiny\.toml: its training has left no checkpoint in"):
        check_release(recipe)


def test_a_checkpoint_that_is_not_there_is_named_with_what_is(recipe: Recipe) -> None:
    for step in (2, 4):
        publish(recipe.at("checkpoint", f"iter_000000{step}"))
    beside = r"--checkpoint .*/iter_0000003: no checkpoint there.*: iter_0000002, iter_0000004$"
    with pytest.raises(ConfigError, match=beside):
        check_release(recipe, recipe.at("checkpoint", "iter_0000003"))
    with pytest.raises(ConfigError, match=r"--checkpoint .*/elsewhere: no .* of a step in it$"):
        check_release(recipe, recipe.at("elsewhere"))
