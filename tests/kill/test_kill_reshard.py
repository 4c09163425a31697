"""Conversions, killed anywhere and run again, end with the digest of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kill.yard import Yard
from trainyard.testing.kill import Zygote, check_kill_anywhere

pytestmark = [pytest.mark.kill, pytest.mark.timeout(900)]

CONVERSIONS = {
    "Hugging Face to ours": ("export", "--saver", "trainyard", "--num-shards", "2"),
    "ours to Megatron-LM": ("checkpoint", "--saver", "core", "--target-tensor-parallel-size", "2"),
    "ours to torch_dist": ("checkpoint", "--saver", "torch_dist", "--num-shards", "2"),
    "ours to ours": ("checkpoint", "--num-shards", "3"),
}
"""Name of the artifact that is read, and options."""


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_a_conversion_survives_a_kill_anywhere(
    conversion: str, zygote: Zygote, yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_CACHE", yard.at("cache"))
    artifact, *options = CONVERSIONS[conversion]
    given = ["--load-dir", yard.at(artifact), *options]
    check_kill_anywhere(
        zygote,
        "stages.reshard",
        lambda name: [*given, "--save-dir", str(tmp_path / name)],
        lambda name: str(tmp_path / name / "manifest.json"),
        12,
    )
    hidden = [path for path in tmp_path.rglob(".*") if path.name != ".metadata"]
    assert hidden == []
