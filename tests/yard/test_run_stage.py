"""A training that is run alone, on a yard that says what memory its GPUs have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.yard.faults import training
from tests.yard.yard import Yard

pytestmark = [pytest.mark.yard, pytest.mark.timeout(200)]


def test_a_training_is_planned_first_and_refused_where_it_does_not_fit(
    tmp_path: Path, prefect_api: dict[str, str]
) -> None:
    yard = Yard(tmp_path, prefect_api)
    document = training(tmp_path, str(tmp_path / "run"), 4)
    profile = tmp_path / "mysite.toml"
    command = ("-m", "flows.run_stage", "pretrain", "--config", document, "--profile", str(profile))

    profile.write_text("gpu_memory_gib = 0.0001\n")
    refused = yard.run(*command)
    assert (refused.status, refused.states()) == (2, {"plan": "failed"})
    assert "this layout needs" in refused.err
    assert not (tmp_path / "run").exists()

    profile.write_text("gpu_memory_gib = 16\n")
    trained = yard.run(*command)
    assert (trained.status, trained.states()) == (0, {"plan": "done", "pretrain": "done"})
    assert trained.out == f"{tmp_path}/run/manifest.json\n"
