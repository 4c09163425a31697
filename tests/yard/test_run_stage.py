"""A training on a yard that says what memory its GPUs have: run alone, and in the whole flow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.yard.faults.faults import training
from tests.yard.yard import COLLECTED, Yard

pytestmark = [pytest.mark.yard, pytest.mark.timeout(200)]


def test_training_that_does_not_fit_is_refused(tmp_path: Path, prefect_api: dict[str, str]) -> None:
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


def test_layout_that_does_not_fit_is_refused(tmp_path: Path, prefect_api: dict[str, str]) -> None:
    """Eight GPUs, none of which has room for all of the model, as the recipe would have it."""
    yard = Yard(tmp_path, {**prefect_api, "TRAINYARD_CACHE": str(tmp_path / "cache")})
    profile = tmp_path / "mysite.toml"
    profile.write_text("gpu_memory_gib = 16\n")
    large = COLLECTED
    for small, much in (
        ("num_layers = 2", "num_layers = 32"),
        ("hidden_size = 32", "hidden_size = 4096"),
        ("num_attention_heads = 2", "num_attention_heads = 32"),
        ("micro_batch_size = 4", "micro_batch_size = 1\nbf16 = true\nnproc_per_node = 8"),
    ):
        assert small in large
        large = large.replace(small, much)
    command = ("-m", "flows.pretrain_gpt", yard.recipe(large), "--profile", str(profile))
    refused = yard.run(*command)
    assert refused.status == 2, refused.err
    assert refused.states()["plan"] == "failed"
    assert set(refused.states()) <= {"plan", "collect"}
    assert "this layout needs" in refused.err
    assert "--tensor-model-parallel-size" in refused.err
    assert not (yard.tiny / "checkpoint").exists()
    assert not (yard.tiny / "tokens").exists()
