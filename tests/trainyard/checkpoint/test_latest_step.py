"""The latest step of a run that goes on meanwhile, and removes the steps before it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.trainyard.checkpoint.samples import save
from trainyard.artifacts import store
from trainyard.checkpoint.load import open_checkpoint
from trainyard.checkpoint.steps import locate_step
from trainyard.errors import ArtifactError

Act = Callable[[], object]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (50, 100):
        save(str(tmp_path / "run"), {"model.a": torch.full((2,), float(step))}, step=step)
    return tmp_path / "run"


@pytest.fixture
def behind() -> Iterator[Callable[[str, int, Act], None]]:
    """Does something once: before the operation behind the n-th one on a file of that name."""
    before = list(store.observers)

    def watch(name: str, number: int, act: Act) -> None:
        seen = 0

        def observe(operation: str, url: str) -> None:
            nonlocal seen
            if seen == number:
                store.observers.remove(observe)
                act()
            seen += url.endswith(name)

        store.observers.append(observe)

    yield watch
    store.observers[:] = before


def removes(run: Path, step: int) -> Act:
    return lambda: shutil.rmtree(run / f"iter_{step:07d}")


def replaces(run: Path) -> Act:
    """What a run does that keeps one step."""

    def act() -> None:
        save(str(run), {"model.a": torch.full((2,), 150.0)}, step=150)
        for step in (50, 100):
            removes(run, step)()

    return act


@pytest.mark.parametrize("name", ["manifest.json", "index.json"])
def test_a_step_that_goes_while_it_is_looked_at_is_not_the_latest(
    run: Path, behind: Callable[[str, int, Act], None], name: str
) -> None:
    behind(f"iter_0000100/{name}", 1, removes(run, 100))
    with open_checkpoint(str(run)) as checkpoint:
        assert checkpoint.step == 50
        assert torch.equal(checkpoint.read("model.a"), torch.full((2,), 50.0))


@pytest.mark.parametrize("name", ["iter_0000100/manifest.json", "iter_0000100/index.json", "run"])
def test_the_newer_one_is_taken_in_its_place(
    run: Path, behind: Callable[[str, int, Act], None], name: str
) -> None:
    behind(name, 1, replaces(run))
    with open_checkpoint(str(run)) as checkpoint:
        assert checkpoint.step == 150


def test_a_step_that_was_asked_for_by_name_and_goes_is_an_error_in_words(
    run: Path, behind: Callable[[str, int, Act], None]
) -> None:
    step = run / "iter_0000100"
    behind("iter_0000100/manifest.json", 1, removes(run, 100))
    with pytest.raises(ArtifactError, match=r"iter_0000100/index.json: there is no such file"):
        open_checkpoint(str(step))
    with pytest.raises(ArtifactError, match="no checkpoint there"):
        locate_step(str(step), "--load")


def test_damage_is_no_removal(run: Path) -> None:
    (run / "iter_0000100" / "index.json").unlink()
    with pytest.raises(ArtifactError, match=r"iter_0000100/index.json: there is no such file"):
        open_checkpoint(str(run))
