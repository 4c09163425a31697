"""A recipe becomes the jobs of a flow that tunes a model, whose options its checkpoint brings."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.recipes.finetune import FinetuneJobs, finetune_jobs
from flows.recipes.recipe import parse_recipe, read_recipe
from tests.flows.processes import ROOT
from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.gpt.config import GPTConfig

TINY = """
base = "small"
[collect]
num_shards = 2
[finetune]
chat_template = "plain.jinja"
micro_batch_size = 2
train_iters = 5
lr = 1e-3
[benchmark]
prompts = ["Why?"]
"""


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model of the quick start's, and of another recipe's."""
    folder = tmp_path_factory.mktemp("yard")
    model = GPTConfig(num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=32)
    for name in ("small", "quickstart"):
        save_gpt(str(folder / name / "checkpoint"), random_gpt(model), step=50)
    return folder


def jobs(yard: Path, text: str = TINY) -> FinetuneJobs:
    return finetune_jobs(parse_recipe(text, "tuned.toml", str(yard)))


def test_the_model_and_its_tokenizer_come_from_the_base(yard: Path) -> None:
    every = jobs(yard)
    assert [job.name for job in every.all()] == ["collect", "finetune", "benchmark", "report"]
    assert every.collect is not None
    assert every.collect.document["conversations"] is True
    tuned = every.finetune
    assert (tuned.stage, tuned.document["num_layers"], tuned.document["sft"]) == (
        "pretrain",
        2,
        True,
    )
    assert tuned.document["load"] == str(yard / "small" / "checkpoint")
    assert tuned.document["tokenizer_type"] == "SFTTokenizer"
    shards = [str(yard / f"tuned/instructions/train-0000{n}.jsonl") for n in range(2)]
    assert tuned.document["train_data_path"] == ["1", shards[0], "1", shards[1]]
    assert tuned.document["valid_data_path"] == [str(yard / "tuned/instructions/heldout.jsonl")]
    assert every.benchmark.document["load"] == tuned.document["save"]
    assert every.benchmark.document["chat"] is True


def test_data_of_ones_own_replaces_collect(yard: Path) -> None:
    own = TINY.replace("[collect]\nnum_shards = 2\n", "").replace(
        "lr =", 'data_path = ["a.jsonl"]\nlr ='
    )
    every = jobs(yard, own)
    assert every.collect is None
    assert every.finetune.document["data_path"] == ["a.jsonl"]
    assert "train_data_path" not in every.finetune.document


def test_questions_are_answered_if_the_recipe_has_some(yard: Path) -> None:
    asked = 'evaluation_data = "nq/test.json"\n' + TINY + '[evaluate]\ntask = "nq"\n'
    every = jobs(yard, asked)
    assert every.evaluate is not None
    assert every.evaluate.document["valid_data"] == ["nq/test.json"]
    assert every.report.document["evaluation"] == every.evaluate.document["output_dir"]


def test_the_recipe_in_the_repository_is_valid(yard: Path) -> None:
    path = str(ROOT / "recipes" / "finetune_quickstart.toml")
    assert finetune_jobs(read_recipe(path, str(yard))).all()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('base = "small"', "", r'Give base = "quickstart"'),
        (
            'base = "small"',
            'base = "absent"',
            r"\[finetune\]: --load .*absent/checkpoint: no ch",
        ),
        ("[collect]\nnum_shards = 2\n", "", "nothing names the instruction data"),
        ("lr =", 'data_path = ["a.jsonl"]\nlr =', r"data_path and \[collect\] both name"),
        ("[benchmark]", "[evaluate]\ntask = 'nq'\n[benchmark]", "evaluation_data go together"),
        ("lr =", "save = '{yard}'\nlr =", r"\[finetune\] save .* holds the other artifacts"),
        ("lr =", "hidden_size = 'x'\nlr =", r"\[finetune\].*hidden_size"),
    ],
)
def test_a_recipe_that_cannot_be_run_is_refused(
    yard: Path, before: str, after: str, message: str
) -> None:
    with pytest.raises((ConfigError, ArtifactError), match=message):
        jobs(yard, TINY.replace(before, after.replace("{yard}", str(yard))))
