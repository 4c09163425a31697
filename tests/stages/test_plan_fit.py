"""A layout that does not fit its GPUs is refused, with those that do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from stages.plan.config import PlanConfig
from stages.plan.fit import GIBIBYTE, USABLE, check_fit, device_bytes, nearest_that_fit
from stages.plan.run import plan
from tests.stages.test_plan import GPT_345M, LLAMA3_8B, MIXTRAL
from trainyard.config import from_dict
from trainyard.errors import ConfigError

CUT_8B = {**LLAMA3_8B, "vocab_size": 128256, "world_size": 8, "global_batch_size": 64}


def config(document: dict[str, Any], **options: Any) -> PlanConfig:
    return from_dict(PlanConfig, {**document, **options}, "test")


def test_a_layout_that_fits_passes_and_without_a_limit_every_layout_does() -> None:
    check_fit(config(CUT_8B))
    check_fit(config(CUT_8B, tensor_model_parallel_size=8, gpu_memory_gib=80))


def test_the_checked_bytes_are_those_of_the_plan() -> None:
    dense = config(GPT_345M)
    assert device_bytes(dense) == plan(dense)["memory_detail_bytes"]["total"]
    experts = config(MIXTRAL, world_size=8, expert_model_parallel_size=8)
    assert device_bytes(experts) == plan(experts)["memory_detail_bytes"]["total"]


def test_a_layout_that_does_not_fit_is_refused_with_the_nearest_that_do() -> None:
    alone = config(CUT_8B, gpu_memory_gib=80)
    with pytest.raises(ConfigError, match=r"GiB on its most loaded device.*nearest.*--") as caught:
        check_fit(alone)
    assert "--gpu-memory-gib 80" in str(caught.value)


@pytest.mark.parametrize("gibibytes", [24, 40, 80])
def test_every_suggested_layout_fits_and_does_the_same_work(gibibytes: int) -> None:
    alone = config(CUT_8B)
    usable = USABLE * gibibytes * GIBIBYTE
    found = nearest_that_fit(alone, usable)
    assert found
    assert [one.distance for one in found] == sorted(one.distance for one in found)
    for one in found:
        options: dict[str, Any] = dict(one.changes)
        other = config(CUT_8B, **options)
        assert device_bytes(other) == one.bytes <= usable
        assert (other.num_devices, other.global_batch) == (8, 64)


def test_the_nearest_layout_has_the_fewest_changes() -> None:
    alone = config(CUT_8B)
    barely = device_bytes(dataclasses.replace(alone, use_distributed_optimizer=True))
    (first, *_) = nearest_that_fit(alone, barely)
    assert first.changes == {"use_distributed_optimizer": True}


@pytest.mark.slow
def test_if_no_layout_fits_the_fewest_sufficient_devices_are_named() -> None:
    alone = config(CUT_8B, gpu_memory_gib=10)
    usable = USABLE * 10 * GIBIBYTE
    with pytest.raises(ConfigError, match=r"none fits on as many.*on more: --world-size 32 "):
        check_fit(alone)
    assert not nearest_that_fit(alone, usable)
    (found,) = nearest_that_fit(alone, usable, 1, 32)
    other = config(CUT_8B, **dict(found.changes))
    assert device_bytes(other) == found.bytes <= usable
    assert (other.num_devices, other.global_batch) == (32, 64)


@pytest.mark.slow
def test_if_no_number_of_devices_suffices_the_error_says_so() -> None:
    with pytest.raises(ConfigError, match=r"none fits on up to 512 devices"):
        check_fit(config(CUT_8B, gpu_memory_gib=0.1))


def test_a_suggestion_without_pipeline_is_not_interleaved() -> None:
    cut = config(
        CUT_8B,
        pipeline_model_parallel_size=2,
        num_layers_per_virtual_pipeline_stage=4,
        gpu_memory_gib=80,
    )
    found = nearest_that_fit(cut, USABLE * 80 * GIBIBYTE, most=50)
    assert any(one.changes.get("pipeline_model_parallel_size") == 1 for one in found)


def test_memory_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="--gpu-memory-gib must be positive"):
        config(GPT_345M, gpu_memory_gib=0.0)
