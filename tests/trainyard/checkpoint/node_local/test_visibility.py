"""Folders of nodes: who sees which, what is in them, and what is whole over all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.trainyard.checkpoint.samples import contents, some_tensors
from trainyard.artifacts.manifest import read_manifest
from trainyard.checkpoint.node_local.read import open_scattered
from trainyard.checkpoint.node_local.save import LocalSave
from trainyard.checkpoint.node_local.steps import LocalSteps, PartialStep, candidates, partial_steps
from trainyard.checkpoint.node_local.visibility import (
    find_visibility,
    firsts_of,
    ranges_of,
    visible_to_all,
)
from trainyard.checkpoint.ranks import ALONE, Ranks
from trainyard.testing.pool import RankPool
from trainyard.training.run.checkpointing import Retention


def places_of(folders: list[str]) -> tuple[tuple[int, ...], list[int], bool]:
    rank = dist.get_rank()
    found = find_visibility(folders[rank], Ranks(dist.group.WORLD, rank, len(folders)))
    return found.of_rank, found.ranks(found.of_rank[rank]), found.is_first


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_of_one_folder_find_each_other_whatever_it_is_called(
    ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    folders = [str(tmp_path / name) for name in ("a", "b", "link")]
    assert ranks.run(places_of, 3, folders) == [
        ((0, 1, 0), [0, 2], True),
        ((0, 1, 0), [1], True),
        ((0, 1, 0), [0, 2], False),
    ]
    assert not list((tmp_path / "a").iterdir())


@given(st.lists(st.sets(st.integers(0, 7)), min_size=8, max_size=8))
def test_a_rank_belongs_to_the_first_that_it_sees_and_that_sees_it(sets: list[set[int]]) -> None:
    seen = [sorted({*found, rank}) for rank, found in enumerate(sets)]
    expected: list[int] = []
    for rank, others in enumerate(seen):
        both = [other for other in others if other <= rank and rank in seen[other]]
        expected.append(rank if both[0] == rank else expected[both[0]])
    ranges = [ranges_of(others) for others in seen]
    assert firsts_of(ranges) == tuple(expected)
    assert [[n for a, b in found for n in range(a, b)] for found in ranges] == seen


def test_candidates_are_the_highest_first_and_of_two_saves_the_better_known() -> None:
    def held(step: int, digest: str) -> PartialStep:
        return PartialStep(step, digest, ())

    nodes = [[held(1, "a"), held(3, "c")], [held(3, "b")], [held(3, "b"), held(2, "a")], []]
    assert candidates(nodes) == [(3, "b"), (3, "c"), (2, "a"), (1, "a")]


def save(folder: Path, step: int, keep_last: int = 1) -> LocalSteps:
    steps = LocalSteps(str(folder), "abc", visible_to_all(ALONE), ALONE)
    saving = LocalSave(steps, keep_last)
    prepared = saving.prepare(step, some_tensors(step), "abc", ALONE)
    saving.write(prepared, contents(step), ALONE)
    return steps


def test_the_newest_stay_and_those_of_an_attempt_that_got_further_go(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep_last=2)
    assert [held.step for held in partial_steps(str(tmp_path), "abc")] == [2, 3]
    save(tmp_path, 1, keep_last=2)
    assert [held.step for held in partial_steps(str(tmp_path), "abc")] == [1]
    assert partial_steps(str(tmp_path), "another lineage") == []


def test_a_step_on_one_node_is_as_any_other(tmp_path: Path) -> None:
    steps = save(tmp_path, 7)
    found = steps.find(1, "digests", lambda url: None)
    assert found is not None
    assert (found.step, found.sight) == (7, None)
    manifest = read_manifest(str(tmp_path / "iter_0000007/manifest.json"))
    assert manifest is not None
    assert found.digest == manifest[0].output_digest
    assert steps.find(8, "sizes", lambda url: None) is None  # the run folder has a newer one
    assert steps.find(1, "sizes", lambda url: "not wanted") is None


@pytest.mark.parametrize("name", ["state.json", "index.json", "model-00001-of-00001.safetensors"])
def test_a_step_that_lacks_a_file_is_not_whole(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = save(tmp_path, 7)
    (tmp_path / "iter_0000007" / name).unlink()
    assert steps.find(1, "sizes", lambda url: None) is None
    assert "skipping step 7 in" in caplog.text
    assert name in caplog.text


# --- what goes when another is there -------------------------------------------------------------


def test_a_step_that_passes_goes_once_newer_ones_are_there() -> None:
    retention = Retention(1, staying=(10,), passing=(15,))
    assert retention.published(20, stays=True) == [15]
    assert retention.published(25, stays=False) == []
    assert retention.published(26, stays=False) == [25]
    assert retention.published(26, stays=False) == []  # made good
    assert retention.published(30, stays=True) == [26]


def test_a_copy_that_comes_late_goes_at_once() -> None:
    retention = Retention(1, staying=(), passing=())
    assert retention.published(20, stays=True) == []
    assert retention.published(15, stays=False) == [15]
    assert Retention(2, staying=(20,), passing=()).published(15, stays=False) == []


def test_tensors_of_a_node_are_bit_for_bit_those_of_the_run(tmp_path: Path) -> None:
    save(tmp_path, 7)
    with open_scattered(str(tmp_path / "iter_0000007"), None, "digests") as checkpoint:
        for name, tensor in some_tensors(7).items():
            assert torch.equal(checkpoint.read(name), tensor), name
