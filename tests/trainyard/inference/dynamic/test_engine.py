"""The dynamic engine = the static one, token for token in fp32, in any company and order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trainyard.inference.dynamic.engines import build_engine, requests_of, run_all
from tests.trainyard.inference.small_models import GPTS, build, run, some_prompts
from trainyard.inference.config import SamplingConfig
from trainyard.inference.request import Completion
from trainyard.testing.tolerances import FP32_SUM_ORDER

KINDS = (*GPTS, "retro")
SAMPLED: dict[str, Any] = {
    "sampling": SamplingConfig(top_k=0, temperature=1.3),
    "log_probs": True,
    "prompt_log_probs": True,
    "top_n": 2,
}


def check_same(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.finish_reason == other.finish_reason
        for name in ("log_probs", "prompt_log_probs"):
            mine, theirs = (torch.tensor(getattr(x, name)) for x in (one, other))
            torch.testing.assert_close(mine, theirs, **FP32_SUM_ORDER)
        for name in ("top", "prompt_top"):
            mine, theirs = (
                [[token for token, _ in place] for place in getattr(x, name)] for x in (one, other)
            )
            assert mine == theirs


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_dynamic_engine_makes_the_texts_of_the_static_one(
    kind: str, options: dict[str, Any]
) -> None:
    model: Any = build(kind)
    prompts = some_prompts(3, 17, 9, 12, 5)
    expected = run(model, prompts, 10, **options).completions
    engine = build_engine(model, num_blocks=13, max_requests=4, max_tokens=7)
    check_same(run_all(engine, requests_of(prompts, 10, **options), arrive_every=2), expected)
    assert engine.stats().preemptions > 0
