"""The document of a stage: written options, and a device for its GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from flows.backends.spec import Resources
from flows.recipes.stage_job import StageJob, stage_job
from flows.runner.stage_spec import stage_document
from flows.yard.profile import StageEnvironment

GPU = StageEnvironment(
    run_folder="/runs", resources_by_stage={"benchmark": Resources(gpus_per_node=1)}
)
NO_GPU = StageEnvironment(run_folder="/runs")


def benchmark(**options: Any) -> StageJob:
    document = {"load": "model", "output_dir": "out", "prompts": ["x"], **options}
    return stage_job("benchmark", document, "test")


def merge() -> StageJob:
    return stage_job("merge", {"input": ["parts"], "output_prefix": "all"}, "test")


@pytest.mark.parametrize(
    ("site", "written", "device"),
    [
        (GPU, {}, "cuda"),
        (GPU, {"device": "cpu"}, "cpu"),
        (GPU, {"device": "auto"}, "auto"),
        (GPU, {"device": None}, "cuda"),
        (NO_GPU, {}, None),
        (NO_GPU, {"device": "cuda"}, "cuda"),
    ],
)
def test_a_stage_with_gpus_computes_on_them_unless_it_says_where(
    site: StageEnvironment, written: dict[str, Any], device: str | None
) -> None:
    assert stage_document(benchmark(**written), site).get("device") == device


def test_a_stage_without_a_device_option_gets_none() -> None:
    everywhere = StageEnvironment(run_folder="/runs", resources=Resources(gpus_per_node=8))
    assert "device" not in stage_document(merge(), everywhere)
