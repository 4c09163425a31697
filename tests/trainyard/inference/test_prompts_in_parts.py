"""Long prompts pass a model some rows at a time, and everything is as if they passed together."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.trainyard.inference.small_models import build, some_prompts
from trainyard.fp8.weights import E4M3
from trainyard.inference.decoders import CachedDecoder
from trainyard.inference.request import Request
from trainyard.inference.static import GenerationResult, run_requests
from trainyard.models.costs import inference_memory
from trainyard.models.costs.inference_memory import rows_at_once
from trainyard.models.gpt.model import GPTModel
from trainyard.testing.tolerances import FP32_SUM_ORDER

PROMPTS = some_prompts(9, 20, 4, 13, 2)
COUNT = 6


def generated(
    family: str, *, kv_dtype: torch.dtype | None, top_n: int
) -> tuple[GenerationResult, Sequence[int]]:
    """And the lengths of the cache at the end."""
    model = build(family)
    assert isinstance(model, GPTModel)
    requests = [
        Request(prompt=p, max_tokens=COUNT, number=i, prompt_log_probs=bool(top_n), top_n=top_n)
        for i, p in enumerate(PROMPTS)
    ]
    decoder = CachedDecoder(model, len(PROMPTS), 30, kv_dtype=kv_dtype)
    run_requests(decoder, requests)
    return run_requests(decoder, requests), decoder.cache.lengths


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [("llama", None), ("llama", E4M3), ("mistral", None), ("mixtral", None), ("hybrid", None)],
)
@pytest.mark.parametrize("top_n", [0, 2])
def test_rows_in_parts_give_the_texts_and_scores_of_all_together(
    family: str, kv_dtype: torch.dtype | None, top_n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, lengths = generated(family, kv_dtype=kv_dtype, top_n=top_n)
    monkeypatch.setattr(inference_memory, "PROMPT_TOKENS", 45)
    assert rows_at_once(len(PROMPTS), max(map(len, PROMPTS))) == 2, "of 5: parts of 2, 2 and 1"
    parts, lengths_in_parts = generated(family, kv_dtype=kv_dtype, top_n=top_n)
    assert parts.outputs == whole.outputs
    assert lengths_in_parts == lengths
    for one, other in zip(parts.completions, whole.completions, strict=True):
        assert len(other.prompt_log_probs or []) == (len(other.request.prompt) - 1 if top_n else 0)
        assert len(other.prompt_top) == len(other.prompt_log_probs or [])
        for name in ("prompt_log_probs", "prompt_top"):
            mine, theirs = (torch.tensor(getattr(x, name) or []) for x in (one, other))
            torch.testing.assert_close(mine, theirs, **FP32_SUM_ORDER)


def test_a_prompt_passes_whole_however_long() -> None:
    assert rows_at_once(64, 1024) == 8
    assert rows_at_once(64, 10**6) == 1
    assert rows_at_once(3, 16) == 3
