"""The harness itself, on the toy stage: finished units are kept, torn ones are not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainyard.artifacts import store
from trainyard.testing.kill import Zygote, check_kill_anywhere, spread


def test_points_are_spread_from_the_first_to_the_last_operation() -> None:
    assert spread(3, 20) == [1, 2, 3]
    assert spread(101, 5) == [1, 26, 51, 76, 101]


@pytest.mark.kill
def test_the_toy_stage_survives_a_kill_anywhere(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("one\ntwo\nthree\n")
    os.utime(tmp_path / "in.txt", (1e9, 1e9))  # settled: its digest is remembered

    def arguments(name: str) -> list[str]:
        folder = str(tmp_path / name)
        return ["--input", str(tmp_path / "in.txt"), "--output-dir", folder]

    def manifest_url(name: str) -> str:
        return store.join(str(tmp_path / name), "manifest.json")

    with Zygote("tests.stages.toy") as zygote:
        kills = check_kill_anywhere(zygote, "tests.stages.toy", arguments, manifest_url, 20)
        assert kills == 20
    leftovers = [path.name for path in tmp_path.rglob("*") if path.name.startswith(".")]
    assert leftovers == []
