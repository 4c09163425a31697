"""A model cut over tensor- and pipeline-parallel ranks serves what one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.trainyard.inference.dynamic.engines import build_engine, requests_of, run_all
from tests.trainyard.inference.dynamic.test_engine import SAMPLED, check_same
from tests.trainyard.inference.small_models import build, run, some_prompts
from trainyard.inference.dynamic.engine import DynamicEngine
from trainyard.inference.dynamic.ranks import Follower
from trainyard.models.pipeline_stage import PipelineStage
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.dims import ParallelDims
from trainyard.parallel.groups import build_groups
from trainyard.parallel.pipeline.partition import partition
from trainyard.testing.pool import RankPool


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
    engine = engine_of_rank(
        kind, tp, pp, num_blocks=9, max_requests=3, max_tokens=7, num_speculative_tokens=2
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
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)], ids=["tp2", "pp2", "tp2 pp2"])
@pytest.mark.parametrize("kind", ["llama", "deepseek", "gpt-oss"])
def test_a_cut_model_serves_as_one_process(ranks: RankPool, kind: str, tp: int, pp: int) -> None:
    ranks.run(check_cut_engine, tp * pp, kind, tp, pp)
