"""`reshard` to virtual pipeline stages and uneven pipeline ranks, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stages.directly import run_program
from tests.stages.test_reshard import assert_same, contents, reshard, tensors
from tests.stages.test_reshard_options import FIRST, LAST, PER_STAGE, STAGES, TWO_BY_TWO
from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from trainyard.errors import ConfigError
from trainyard.models.gpt.config import GPTConfig

GPT = GPTConfig(num_layers=4, hidden_size=16, num_attention_heads=2, seq_length=16)


@pytest.mark.slow
@pytest.mark.parametrize("saver", ["core", pytest.param("legacy", marks=pytest.mark.slow)])
def test_through_virtual_stages_and_back(saver: str, tmp_path: Path) -> None:
    """Both options give the same files; a second layout of them is the same model."""
    save_gpt(str(tmp_path / "run"), random_gpt(GPT))
    for name, options in (("a", {PER_STAGE: 1}), ("b", {STAGES: 2})):
        reshard(tmp_path / "run", tmp_path / name, saver=saver, **TWO_BY_TWO, **options)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    for path in (tmp_path / "a").rglob("model_optim_rng.pt"):
        tree = torch.load(path, weights_only=False)
        assert [key for key in tree if key.startswith("model")] == ["model0", "model1"]
    other = {"target_pipeline_parallel_size": 2, STAGES: 1}
    reshard(tmp_path / "a", tmp_path / "c", saver="core", **other)
    reshard(tmp_path / "c", tmp_path / "back")
    assert_same(tensors(tmp_path / "run"), tensors(tmp_path / "back"))


SIX = GPTConfig(num_layers=6, hidden_size=16, num_attention_heads=2, seq_length=16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "pp", "layers"),
    [
        ({FIRST: 1, LAST: 1}, 3, [[[0]], [[1, 2, 3, 4]], [[5]]]),
        ({FIRST: 2}, 3, [[[0, 1]], [[2, 3]], [[4, 5]]]),
        ({LAST: 4}, 3, [[[0]], [[1]], [[2, 3, 4, 5]]]),
        ({FIRST: 2, STAGES: 2}, 2, [[[0], [3]], [[1, 2], [4, 5]]]),
    ],
)
def test_the_first_and_the_last_rank_may_have_other_numbers_of_layers(
    tmp_path: Path, options: dict[str, int], pp: int, layers: list[list[list[int]]]
) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(SIX))
    target = {"target_pipeline_parallel_size": pp, **options}
    reshard(tmp_path / "run", tmp_path / "theirs", saver="core", **target)
    whole = tensors(tmp_path / "run")
    for rank, chunks in enumerate(layers):
        (path,) = tmp_path.glob(f"theirs/*/mp_rank_00_{rank:03d}/model_optim_rng.pt")
        tree = torch.load(path, weights_only=False)
        models = [tree[key] for key in tree if key.startswith("model")]
        for model, numbers in zip(models, chunks, strict=True):
            name = "decoder.layers.{}.mlp.linear_fc1.weight"
            held = [key for key in model if key.endswith("mlp.linear_fc1.weight")]
            assert held == [name.format(n) for n in range(len(numbers))]
            for place, number in enumerate(numbers):
                wanted = whole[f"model.{name.format(number)}"]
                assert torch.equal(model[name.format(place)], wanted)
    reshard(tmp_path / "theirs", tmp_path / "back")
    assert_same(whole, tensors(tmp_path / "back"))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and in theirs/ what was once made of it."""
    folder = tmp_path_factory.mktemp("converted")
    save_gpt(str(folder / "run"), random_gpt(GPT))
    reshard(folder / "run", folder / "theirs", saver="core", **TWO_BY_TWO)
    return folder


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {STAGES: 3},
            r"2 layers of a pipeline rank must be divisible by --target-num-virtual-stages-per-"
            r"pipeline-rank \(3\); choose --target-num-virtual-stages-per-pipeline-rank 2",
        ),
        ({PER_STAGE: 4}, r"virtual-pipeline-stage \(4\); choose .*virtual-pipeline-stage 2"),
        (
            {"target_pipeline_parallel_size": 3, STAGES: 2},
            r"the 4 layers of the model must be divisible by --target-pipeline-parallel-size \(3\)"
            "; choose --target-pipeline-parallel-size 2 or 4, or divide them unevenly with --tar",
        ),
        (
            {"target_pipeline_parallel_size": 3, FIRST: 1},
            r"--target-decoder-first-pipeline-num-layers \(1\) of the 4 layers of the model must "
            r"leave the same number for each of the other 2 ranks .*\(--tar.*-size 3\); choose 2$",
        ),
        ({FIRST: 3, LAST: 2}, r"must leave none over \(.*; choose together 4$"),
    ],
)
def test_indivisible_layers_fail(converted: Path, options: dict[str, Any], words: str) -> None:
    before = contents(converted / "theirs")
    with pytest.raises(ConfigError, match=words):
        reshard(converted / "run", converted / "theirs", saver="core", **{**TWO_BY_TWO, **options})
    assert contents(converted / "theirs") == before


def test_a_refused_command_leaves_no_folder(tmp_path: Path) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(GPT))
    words = ["--load-dir", str(tmp_path / "run"), "--saver", "core"]
    words += ["--target-pipeline-parallel-size", "3", "--save-dir"]
    run_program("stages.reshard", *words, str(tmp_path / "new/out"), expect=2)
    assert not (tmp_path / "new").exists()
    (tmp_path / "own").mkdir()  # what a person made stays
    run_program("stages.reshard", *words, str(tmp_path / "own"), expect=2)
    assert list((tmp_path / "own").iterdir()) == []
