"""The engine for every family: batch by batch, the texts of each request alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from tests.trainyard.inference.small_models import (
    build,
    decoder_of,
    run,
    some_prompts,
)
from tests.trainyard.serving.running import loaded_of
from trainyard.errors import ConfigError
from trainyard.inference.engine import Update
from trainyard.inference.request import Completion, Request
from trainyard.inference.static import run_requests
from trainyard.models.pipeline_stage import PipelineStage
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.dims import ParallelDims
from trainyard.parallel.groups import build_groups
from trainyard.parallel.pipeline.partition import partition
from trainyard.serving.batch_engine import BatchEngine, BatchFollower
from trainyard.testing.pool import RankPool


def engine_of(kind: str, max_requests: int = 3) -> BatchEngine:
    return BatchEngine(loaded_of(build(kind)), max_requests)


def all_of(engine: BatchEngine) -> dict[int, Completion]:
    done: dict[int, Completion] = {}
    while engine.has_work():
        updates: list[Update] = engine.step()
        done |= {one.number: one.completion for one in updates if one.completion.is_done}
    return done


@pytest.mark.parametrize("kind", ["gpt", "t5", "retro"])
def test_every_request_gets_the_text_that_it_gets_alone(kind: str) -> None:
    engine = engine_of(kind)
    requests = [
        Request(prompt=prompt, max_tokens=3 + i, number=i)
        for i, prompt in enumerate(some_prompts(5, 9, 2, 7))
    ]
    numbers = [engine.add(request) for request in requests]
    done = all_of(engine)
    for number, request in zip(numbers, requests, strict=True):
        model = engine._generator.model
        decoder = decoder_of(model, [request.prompt], request.max_tokens)
        (alone,) = run_requests(decoder, [request]).completions
        assert done[number].tokens == alone.tokens
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.generated_tokens == sum(request.max_tokens for request in requests)


def test_lower_priorities_run_first() -> None:
    engine = engine_of("gpt", max_requests=1)
    request = Request(prompt=[1, 2], max_tokens=1)
    late, soon = engine.add(request, priority=5), engine.add(request, priority=-1)
    assert [engine.step()[0].number for _ in range(2)] == [soon, late]


def test_nothing_more_is_said_of_a_request_that_was_cancelled() -> None:
    engine = engine_of("gpt")
    request = Request(prompt=[1, 2], max_tokens=40)
    numbers = [engine.add(request) for _ in range(4)]
    engine.step()
    engine.cancel(numbers[0])
    engine.cancel(numbers[3])
    assert [update.number for update in engine.step()] == numbers[1:3]
    engine.cancel(numbers[1])
    engine.cancel(numbers[2])
    assert not engine.has_work()
    assert engine.step() == []


def test_a_prompt_may_be_scored_alone() -> None:
    engine = engine_of("gpt")
    scored = Request(prompt=[1, 2, 3], max_tokens=0, prompt_log_probs=True)
    engine.add(scored)
    engine.add(replace(scored, max_tokens=2))
    first, second = engine.step()
    assert (first.num_new, second.num_new) == (0, 1)
    assert first.completion.finish_reason == "length"
    assert first.completion.prompt_log_probs == second.completion.prompt_log_probs
    assert len(first.completion.prompt_log_probs) == 2


def test_requests_that_no_batch_could_hold_are_refused() -> None:
    engine = engine_of("gpt")
    with pytest.raises(ConfigError, match="room for 48"):
        engine.add(Request(prompt=[1] * 40, max_tokens=9))
    with pytest.raises(ConfigError, match="no tokens"):
        engine.add(Request(prompt=[], max_tokens=1))


def test_requests_whose_lengths_do_not_go_together_take_turns() -> None:
    engine = engine_of("gpt")
    for length, count in ((40, 8), (3, 45)):
        engine.add(Request(prompt=[1] * length, max_tokens=count))
    done = all_of(engine)
    assert sorted(len(completion.tokens) for completion in done.values()) == [8, 45]


# --- over ranks -------------------------------------------------------------------------------


def check_over_ranks(kind: str, tp: int, pp: int) -> None:
    """The first rank has the engine, the other one follows it; its texts are those of one rank."""
    groups = build_groups(ParallelDims(tp=tp, pp=pp), dist.get_rank())
    config = ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    whole = build(kind)
    (part,) = partition(config, whole.config.all_layers)[groups.pp_rank]
    stage = PipelineStage(part.layers, part.has_embedding, part.has_output)
    loaded = loaded_of(build(kind, groups.model_parallel(config), stage), groups)
    if groups.rank:
        BatchFollower(loaded).run()
        return
    engine = BatchEngine(loaded, 2)
    prompts = some_prompts(5, 9, 2)
    numbers = [engine.add(Request(prompt=prompt, max_tokens=4)) for prompt in prompts]
    done = all_of(engine)
    engine.step()  # an idle engine says that it lives
    engine.close()
    for number, prompt in zip(numbers, prompts, strict=True):
        assert done[number].tokens == run(whole, [prompt], 4).outputs[0]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)], ids=["tp2", "pp2"])
def test_the_other_ranks_follow_the_first(ranks: RankPool, tp: int, pp: int) -> None:
    ranks.run(check_over_ranks, tp * pp, "t5", tp, pp)
