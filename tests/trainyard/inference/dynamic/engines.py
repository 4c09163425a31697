"""Dynamic engines of small models, run to their ends in many ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

from trainyard.inference.dynamic.build import engine_of
from trainyard.inference.dynamic.config import DynamicConfig
from trainyard.inference.dynamic.engine import DynamicEngine
from trainyard.inference.request import Completion, Request
from trainyard.models.gpt.model import GPTModel
from trainyard.parallel.groups import ALONE, ProcessGroups


def build_engine(
    model: GPTModel,
    *,
    block_size: int = 4,
    num_blocks: int = 64,
    max_requests: int = 8,
    max_tokens: int = 16,
    groups: ProcessGroups = ALONE,
    **options: Any,
) -> Any:
    """An engine, or a follower, with so many blocks, and a slot for each request."""
    config = DynamicConfig(
        inference_dynamic_batching_buffer_guaranteed_fraction=0.0,
        inference_dynamic_batching_block_size=block_size,
        inference_dynamic_batching_max_requests=max_requests,
        inference_dynamic_batching_max_tokens=max_tokens,
        **options,
    )
    sizes = (num_blocks, max_requests)
    with mock.patch("trainyard.inference.dynamic.build.cache_sizes", return_value=sizes):
        return engine_of(model, config, groups)


def requests_of(prompts: Sequence[Sequence[int]], count: int, **options: Any) -> list[Request]:
    return [
        replace(Request(prompt=prompt, max_tokens=count, number=number), **options)
        for number, prompt in enumerate(prompts)
    ]


def run_all(
    engine: DynamicEngine, requests: Sequence[Request], *, arrive_every: int = 0
) -> list[Completion]:
    """Completions of requests, one of which comes every so many steps; 0: all at once."""
    completions: dict[int, Completion] = {}
    left = list(requests)
    numbers: list[int] = []
    steps = 0
    while left or engine.has_work():
        while left and (not arrive_every or steps % arrive_every == 0):
            numbers.append(engine.add(left.pop(0)))
            if arrive_every:
                break
        for update in engine.step():
            assert update.num_new <= len(update.completion.tokens)
            completions[update.number] = update.completion
        steps += 1
    stats = engine.stats()
    assert stats.blocks_used == stats.num_running == stats.num_waiting == 0
    return [completions[number] for number in numbers]
