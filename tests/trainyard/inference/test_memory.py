"""The planned memory of generation is that of the tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.trainyard.inference.small_models import KINDS, VOCAB, build, decoder_of, some_prompts
from trainyard.models.costs.inference_memory import inference_memory
from trainyard.models.parallel_layout import ParallelLayout
from trainyard.models.pipeline_stage import WHOLE, PipelineStage
from trainyard.parallel.model import ALONE

UNCUT = ("google's t5",)
"""Stages do not share a table of relative positions."""


@pytest.mark.few_cases(4)
@pytest.mark.parametrize(
    ("kind", "pp"),
    [(kind, pp) for kind in KINDS[:-1] for pp in (1, 2) if kind not in UNCUT or pp == 1],
)
def test_weights_and_cache_are_those_of_each_stage(kind: str, pp: int) -> None:
    config = build(kind).config
    count = config.all_layers // pp
    stages = [
        PipelineStage(range(i * count, (i + 1) * count), i == 0, i == pp - 1) for i in range(pp)
    ]
    tokens = 8 if kind in ("t5", "google's t5") else config.seq_length
    planned = inference_memory(
        config, VOCAB, ParallelLayout(pp=pp, cp=2, ep=4), bytes_each=4, tokens=tokens
    )
    for stage, own in zip(stages if pp > 1 else [WHOLE], planned, strict=True):
        model = build(kind, ALONE, stage)
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        prompts = some_prompts(*[config.seq_length - 8] * 3)
        assert own.weights == weights
        cache = decoder_of(model, prompts, 8).cache_bytes
        assert (own.tokens * own.kv_per_token + own.state) * 3 == cache


def test_keys_and_values_of_an_encoders_text_count_for_a_t5() -> None:
    model = build("t5")
    (prompt,) = some_prompts(model.config.seq_length)
    decoder = decoder_of(model, [prompt], 8)
    with torch.no_grad():
        decoder.start([prompt])
    (planned,) = inference_memory(model.config, VOCAB, ParallelLayout(), bytes_each=4, tokens=8)
    assert planned.per_request == decoder.cache_bytes


def test_requests_fill_what_the_weights_leave() -> None:
    config = build("llama").config
    (planned,) = inference_memory(config, VOCAB, ParallelLayout(), bytes_each=2, tokens=48)
    assert planned.per_request == 48 * 4 * 2 * 2 * 8 * 2, "2 groups of 8 channels, not 4 heads"
    assert planned.requests_in(planned.weights + 3.5 * planned.per_request) == 3
    assert planned.requests_in(planned.weights / 2) == 0
    (halved,) = inference_memory(config, VOCAB, ParallelLayout(tp=2), bytes_each=2, tokens=48)
    assert halved.per_request * 2 == planned.per_request
    saved = replace(config, recompute_granularity="full", recompute_method="uniform")
    assert inference_memory(saved, VOCAB, ParallelLayout(), bytes_each=2, tokens=48) == [planned]
