"""The parity stage: what is served has the probabilities of what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from stages.parity.config import ParityConfig
from stages.parity.run import run
from tests.stages.directly import run_directly, run_program
from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from tests.trainyard.inference.small_models import GPTS, build
from tests.trainyard.serving.running import loaded_of
from trainyard.config import from_dict
from trainyard.errors import ConfigError
from trainyard.evaluation import parity
from trainyard.evaluation.parity import measure_parity
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.pipeline_stage import PipelineStage
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.dims import ParallelDims
from trainyard.parallel.groups import build_groups
from trainyard.parallel.pipeline.partition import partition
from trainyard.testing.pool import RankPool

MODEL = GPTConfig(num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("run"))
    save_gpt(folder, random_gpt(MODEL), step=7)
    return folder


def test_the_engines_agree_with_the_training(checkpoint: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    metrics = run_directly(
        ParityConfig, run, load=checkpoint, output_dir=str(out), device="cpu", prompts=["the yard"]
    )
    document = json.loads((out / "parity.json").read_text())
    assert (document["step"], document["precision"], document["tolerance"]) == (7, "fp32", 1e-3)
    assert metrics["max_difference"] == max(row["max_difference"] for row in document["rows"])
    assert metrics["max_difference"] < 1e-4
    assert [row["engine"].partition(",")[0] for row in document["rows"]] == [
        *("static", "static", "dynamic", "dynamic", "dynamic")
    ]
    assert [row["num_prompt_tokens"] for row in document["rows"]] == [7, 7, 7, 7, 0]
    assert all(row["num_likeliest"] == row["num_new_tokens"] == 16 for row in document["rows"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*GPTS, "hybrid", "retro"])
def test_every_family_of_both_engines_agrees(kind: str) -> None:
    prompts = [[*range(2, 2 + length)] for length in (1, 9, 20)]
    for row in measure_parity(loaded_of(build(kind)), prompts, 8):
        assert row.max_difference < 1e-4, row
        assert row.num_likeliest == row.num_new_tokens


@pytest.mark.slow
def test_an_engine_that_differs_is_found_and_nothing_is_published(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine leaves a key out of its cache: a fault that no loss of a training shows."""

    def forgets(loaded: Any, *rest: Any, **options: Any) -> Any:
        engine = build_engine(loaded, *rest, **options)
        write = engine._runner.cache.write
        engine._runner.cache.write = lambda layer, k, v: write(layer, k * (layer != 1), v)
        return engine

    build_engine = parity.build_engine
    monkeypatch.setattr(parity, "build_engine", forgets)
    words = ("--load", checkpoint, "--output-dir", str(tmp_path / "out"), "--device", "cpu")
    done = run_program("stages.parity", *words, expect=1)
    assert "differ by more than --tolerance 0.001 nats (dynamic, whole prompts: " in done.err
    assert "static, one batch" in done.out
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bf16": True, "fp16": True}, "--bf16 or --fp16"),
        ({"tolerance": 0.0}, "--tolerance must be"),
        ({"prompts": ["a"], "num_input_tokens": 3}, "give one"),
        ({"prompts": [""]}, "empty text"),
        ({"num_prompts": 0}, "--num-prompts"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_dict(ParityConfig, {"load": "x", **options})


def check_over_ranks(tp: int, pp: int) -> None:
    groups = build_groups(ParallelDims(tp=tp, pp=pp), dist.get_rank())
    config = ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    (part,) = partition(config, build("llama").config.all_layers)[groups.pp_rank]
    stage = PipelineStage(part.layers, part.has_embedding, part.has_output)
    loaded = loaded_of(build("llama", groups.model_parallel(config), stage), groups)
    for row in measure_parity(loaded, [[5], [*range(2, 20)]], 8):
        assert row.max_difference < 1e-4, row


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)], ids=["tp2", "pp2"])
def test_a_model_over_ranks_agrees(ranks: RankPool, tp: int, pp: int) -> None:
    ranks.run(check_over_ranks, tp * pp, tp, pp)
