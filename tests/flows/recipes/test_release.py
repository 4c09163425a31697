"""A release is refused where there is nothing to release."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.cli import flow_commands
from flows.cli.flow_commands import flow_main
from flows.recipes.recipe import Recipe, parse_recipe
from flows.recipes.release import check_checkpoint
from flows.runner.run_lock import LOCK_FILE
from flows.yard.profile import CONTAINED
from trainyard.artifacts import store
from trainyard.errors import ArtifactError

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
        check_checkpoint(recipe, named, "process")


def test_a_recipe_without_a_checkpoint_gives_an_error(recipe: Recipe) -> None:
    store.write_bytes(recipe.at("checkpoint", ".claim.json"), b"{}")  # of a training that begins
    with pytest.raises(ArtifactError, match=r"tiny\.toml: its training has left no checkpoint in"):
        check_checkpoint(recipe, None, "process")


def test_a_missing_checkpoint_is_named_with_the_existing_steps(recipe: Recipe) -> None:
    for step in (2, 4):
        publish(recipe.at("checkpoint", f"iter_000000{step}"))
    beside = r"--checkpoint .*/iter_0000003: no checkpoint there.*: iter_0000002, iter_0000004$"
    with pytest.raises(ArtifactError, match=beside):
        check_checkpoint(recipe, recipe.at("checkpoint", "iter_0000003"), "process")
    with pytest.raises(ArtifactError, match=r"--checkpoint .*/elsewhere: no .* of a step in it$"):
        check_checkpoint(recipe, recipe.at("elsewhere"), "kubernetes")


@pytest.mark.parametrize("backend", ["process", "slurm", "container", "kubernetes"])
def test_a_folder_in_containers_is_not_checked(
    recipe: Recipe, backend: str, tmp_path: Path
) -> None:
    elsewhere = str(tmp_path / "volume" / "of" / "pods")
    if backend in CONTAINED:
        check_checkpoint(recipe, elsewhere, backend)
        return
    with pytest.raises(ArtifactError, match="no checkpoint there"):
        check_checkpoint(recipe, elsewhere, backend)


def test_release_waits_for_a_running_flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the flow itself, behind the other one; until then there is nothing to refuse."""
    (tmp_path / "tiny.toml").write_text(RECIPE)
    monkeypatch.setattr(flow_commands, "run_program", lambda *_, **given: (3, given))
    arguments = [str(tmp_path / "tiny.toml"), "--root", str(tmp_path / "yard")]
    assert flow_main("release", arguments) == 1
    turn = tmp_path / "yard" / "tiny" / LOCK_FILE
    turn.parent.mkdir(parents=True)
    turn.write_text("{}")
    assert flow_main("release", arguments) == 3
    assert flow_main("release", [*arguments, "--checkpoint", str(tmp_path / "none")]) == 1
