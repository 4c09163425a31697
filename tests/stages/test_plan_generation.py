"""The memory of generation that is planned."""

from __future__ import annotations

from typing import Any

import pytest

from stages.plan.inference import memory_of
from stages.plan.run import plan, report
from tests.stages.test_plan import configure
from trainyard.errors import ConfigError


def test_a_family_that_does_not_generate_has_no_memory_of_generation() -> None:
    assert plan(configure(model_type="bert"))["inference"] is None
    assert plan(configure())["inference"] is not None
    with pytest.raises(ConfigError, match="--inference-memory-gib: a --model-type bert generates"):
        plan(configure(model_type="bert", inference_memory_gib=80.0))


def test_the_state_of_a_mamba_takes_the_same_for_a_request_of_any_length() -> None:
    mamba: dict[str, Any] = {"model_type": "mamba", "mamba_num_groups": 1, "bf16": True}
    config = configure(**mamba, inference_max_seq_length=64)
    found = plan(config)["inference"]
    assert found["kv_bytes_per_request"] == 0
    model = config.model
    convolved, ssm = 3 * (2 * model.hidden_size + 2 * 128) * 2, 2 * model.hidden_size * 128 * 4
    assert found["state_bytes_per_request"] == model.num_layers * (convolved + ssm)
    assert found == plan(configure(**mamba, inference_max_seq_length=640))["inference"] | {
        "tokens_per_request": 64
    }
    assert any(line.startswith("  states: ") for line in report(config).splitlines())


@pytest.mark.parametrize("pattern", ["M*M*----", "M*M*----M---"])
def test_a_stage_that_keeps_little_of_a_request_does_not_decide_how_many_fit(pattern: str) -> None:
    hybrid: dict[str, Any] = {
        "model_type": "mamba",
        "mamba_num_groups": 1,
        "num_layers": len(pattern),
        "hybrid_layer_pattern": pattern,
        "untie_embeddings_and_output_weights": True,
        "bf16": True,
    }
    split = configure(**hybrid, pipeline_model_parallel_size=2, inference_memory_gib=8.0)
    first, second = memory_of(split)
    assert first.per_request > second.per_request
    found = plan(split)["inference"]
    assert found["requests_that_fit"] == (8 * 2**30 - first.weights) // first.per_request
    assert found["kv_bytes_per_request"] == first.kv_per_request > 0
    assert found["weight_bytes"] == max(first.weights, second.weights)
