"""A model cut over tensor- and pipeline-parallel ranks generates what one process does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.trainyard.inference.small_models import VOCAB, build, run, some_prompts
from trainyard.inference.config import SamplingConfig
from trainyard.models.costs.inference_memory import inference_memory
from trainyard.models.parallel_layout import ParallelLayout
from trainyard.models.pipeline_stage import PipelineStage
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.dims import ParallelDims
from trainyard.parallel.groups import build_groups
from trainyard.parallel.pipeline.partition import partition
from trainyard.testing.pool import RankPool
from trainyard.testing.tolerances import FP32_SUM_ORDER

SAMPLED = {
    "sampling": SamplingConfig(top_k=0, temperature=1.3),
    "log_probs": True,
    "prompt_log_probs": True,
    "top_n": 2,
}


def check_cut_model(kind: str, tp: int, pp: int) -> None:
    dims = ParallelDims(tp=tp, pp=pp, dp=dist.get_world_size() // (tp * pp))
    groups = build_groups(dims, dist.get_rank())
    whole = build(kind)
    config = ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    (part,) = partition(config, whole.config.all_layers)[groups.pp_rank]
    stage = PipelineStage(part.layers, part.has_embedding, part.has_output)
    model = build(kind, groups.model_parallel(config), stage)
    memory = inference_memory(
        whole.config, VOCAB, ParallelLayout(tp=tp, pp=pp), bytes_each=4, tokens=8
    )
    own = sum(p.numel() * p.element_size() for p in model.parameters())
    assert own == memory[groups.pp_rank].weights
    prompts = some_prompts(3, 11, 6)
    for options in ({}, SAMPLED):
        expected = run(whole, prompts, 8, **options).completions
        found = run(model, prompts, 8, groups, **options).completions
        for one, other in zip(found, expected, strict=True):
            assert one.tokens == other.tokens
            for name in ("log_probs", "prompt_log_probs"):
                mine, theirs = (torch.tensor(getattr(x, name)) for x in (one, other))
                torch.testing.assert_close(mine, theirs, **FP32_SUM_ORDER)
            assert [p[0][0] for p in one.prompt_top] == [p[0][0] for p in other.prompt_top]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)], ids=["tp2", "pp2", "tp2 pp2"])
@pytest.mark.parametrize(
    "kind", ["gpt", "llama", "mistral", "mixtral", "mamba", "hybrid", "hybrid moe", "t5", "retro"]
)
def test_a_cut_model_generates_as_one_process(ranks: RankPool, kind: str, tp: int, pp: int) -> None:
    ranks.run(check_cut_model, tp * pp, kind, tp, pp)


@pytest.mark.slow
@pytest.mark.distributed
def test_relative_positions_are_cut_by_heads(ranks: RankPool) -> None:
    ranks.run(check_cut_model, 2, "google's t5", 2, 1)
