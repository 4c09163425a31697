"""A model cut over tensor- and pipeline-parallel ranks serves what one process does."""

from __future__ import annotations

import asyncio
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from tests.trainyard.inference.dynamic.engines import build_engine, requests_of, run_all
from tests.trainyard.inference.dynamic.test_engine import SAMPLED, check_same
from tests.trainyard.inference.small_models import MAMBAS, build, run, some_prompts
from tests.trainyard.serving.running import service_of
from trainyard.errors import CommunicationError
from trainyard.inference.dynamic.engine import DynamicEngine
from trainyard.inference.dynamic.ranks import BEAT_SECONDS, Follower, Word
from trainyard.models.pipeline_stage import PipelineStage
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.dims import ParallelDims
from trainyard.parallel.groups import build_groups
from trainyard.parallel.pipeline.partition import partition
from trainyard.serving.engine_side import engine_in_thread
from trainyard.testing.pool import RankPool
from trainyard.tokenizers.bytelevel import ByteLevelTokenizer
from trainyard.tokenizers.config import TokenizerConfig


def engine_of_rank(kind: str, tp: int, pp: int, **options: Any) -> DynamicEngine | Follower:
    groups = build_groups(ParallelDims(tp=tp, pp=pp), dist.get_rank())
    config = ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    whole: Any = build(kind)
    (part,) = partition(config, whole.config.all_layers)[groups.pp_rank]
    stage = PipelineStage(part.layers, part.has_embedding, part.has_output)
    model: Any = build(kind, groups.model_parallel(config), stage)
    engine: DynamicEngine | Follower = build_engine(model, groups=groups, **options)
    return engine


def check_cut_engine(kind: str, tp: int, pp: int) -> None:
    guesses = 0 if kind in MAMBAS else 2
    engine = engine_of_rank(
        kind, tp, pp, num_blocks=9, max_requests=3, max_tokens=7, num_speculative_tokens=guesses
    )
    if isinstance(engine, Follower):
        engine.run()
        return
    prompts = some_prompts(3, 9, 5)
    expected = run(build(kind), prompts, 12, **SAMPLED).completions
    with engine:
        check_same(run_all(engine, requests_of(prompts, 12, **SAMPLED)), expected)
        assert engine.step() == [], "no work left"
    assert engine.stats().preemptions > 0


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "tp", "pp"),
    [
        *(("llama", 2, 2), ("deepseek", 2, 1), ("gpt-oss", 1, 2), ("mixtral", 2, 1), ("gpt", 1, 2)),
        *(("hybrid", 2, 1), ("hybrid moe", 1, 2)),
    ],
)
def test_a_cut_model_serves_as_one_process(ranks: RankPool, kind: str, tp: int, pp: int) -> None:
    ranks.run(check_cut_engine, tp * pp, kind, tp, pp)


def check_dead_rank(told: Path) -> None:
    engine = engine_of_rank("llama", 2, 1)
    if isinstance(engine, Follower):
        engine._link.hear()
        os._exit(7)
    with pytest.raises(CommunicationError), engine:
        run_all(engine, requests_of(some_prompts(3), 40))
    told.write_text("told")


@pytest.mark.slow
@pytest.mark.distributed
def test_a_dead_rank_is_an_error_and_no_hang(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"exit|died|ended|7"):
        ranks.run(check_dead_rank, 2, tmp_path / "told")
    assert (tmp_path / "told").read_text() == "told"


def check_idle(seconds: float) -> None:
    engine = engine_of_rank("llama", 2, 1)
    if isinstance(engine, Follower):
        engine.run()
        return
    with engine:
        told: list[Word] = []
        say = engine._link.say
        engine._link.say = lambda word, batch=None: (told.append(word), say(word, batch))  # type: ignore
        engine._link._said -= seconds
        assert engine.step() == []
        assert engine.step() == []
        assert told == [Word.IDLE]


@pytest.mark.slow
@pytest.mark.distributed
def test_an_idle_engine_says_from_time_to_time_that_it_lives(ranks: RankPool) -> None:
    ranks.run(check_idle, 2, 2 * BEAT_SECONDS)


def check_served_after_a_pause(timeout_seconds: float) -> None:
    (prompt,) = some_prompts(3)
    expected = run(build("llama"), [prompt], 4).outputs[0]
    engine = engine_of_rank("llama", 2, 1)
    _set_pg_timeout(timedelta(seconds=timeout_seconds), engine._link._group)
    if isinstance(engine, Follower):
        engine.run()
        return

    async def work(connection: socket.socket) -> list[int]:
        service = service_of(engine, connection, 1)
        await service.start()
        await asyncio.sleep(1.5 * timeout_seconds)
        with service.open(requests_of([prompt], 4)) as stream:
            tokens = [token async for _, piece in stream for token in piece.tokens]
        await service.stop()
        return tokens

    tokenizer = ByteLevelTokenizer(TokenizerConfig(tokenizer_type="ByteLevelTokenizer"))
    with engine, engine_in_thread(engine, tokenizer) as connection:
        assert asyncio.run(work(connection)) == expected


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_that_wait_longer_than_their_timeout_serve_again(ranks: RankPool) -> None:
    ranks.run(check_served_after_a_pause, 2, 6.0)
