"""Temporary files of killed runs are removed, those of live ones and other artifacts are not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainyard.artifacts.abandoned import Abandoned
from trainyard.artifacts.process import machine_mark, started

DEAD = f".tmp-{machine_mark()}.{2**22 + 1}.7.0123abcd-"
LIVING = f".tmp-{machine_mark()}.{os.getpid()}.{started(os.getpid())}.0123abcd-"


def test_those_of_a_prefix_are_removed_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    ours, others = f"{DEAD}ours.bin", [f"{LIVING}ours.bin", f"{DEAD}theirs.bin", "ours.bin"]
    others.append(f"below/{DEAD}ours.bin")
    for name in (ours, *others):
        (tmp_path / name).touch()
    Abandoned().delete(str(tmp_path), "ours")
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")} == {
        "below",
        *others,
    }


def test_without_a_prefix_all_below_the_folder_are_removed(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    for name in (f"{DEAD}a", f"below/{DEAD}b", f"below/{LIVING}c"):
        (tmp_path / name).touch()
    Abandoned().delete(str(tmp_path))
    assert [path.name for path in tmp_path.rglob("*")] == ["below", f"{LIVING}c"]


def test_a_folder_of_many_artifacts_is_listed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (tmp_path / f"{DEAD}{name}.bin").touch()
    listings, list_folder = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listings.append(path) or list_folder(path))
    abandoned = Abandoned()
    for name in "abc":
        abandoned.delete(str(tmp_path), name)
    assert listings == [str(tmp_path)]
    assert not list(tmp_path.iterdir())


def test_a_folder_that_does_not_exist_has_none(tmp_path: Path) -> None:
    Abandoned().delete(str(tmp_path / "nowhere"), "ours")
    Abandoned().delete("s3://bucket/folder", "ours")
