"""A recipe becomes the jobs of a flow that trains a model on the least toxic of its own texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.recipes.detoxify import DetoxifyJobs, detoxify_jobs
from flows.recipes.recipe import parse_recipe, read_recipe
from tests.flows.processes import ROOT
from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.gpt.config import GPTConfig

TINY = """
base = "small"
[generate]
num_samples = 4
top_k = 0
[score]
classifier = "ngrams"
classifier_data = "labels.jsonl"
keep_fraction = 0.5
[pretrain]
micro_batch_size = 2
train_iters = 5
lr = 1e-3
[continuations]
prompt_file = "prompts.jsonl"
samples_per_prompt = 3
top_k = 0
[evaluate]
task = "WIKITEXT103"
"""


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model of the quick start's, and of another recipe's."""
    folder = tmp_path_factory.mktemp("yard")
    model = GPTConfig(num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=32)
    for name in ("small", "quickstart"):
        save_gpt(str(folder / name / "checkpoint"), random_gpt(model), step=50)
    return folder


def jobs(yard: Path, text: str = TINY) -> DetoxifyJobs:
    return detoxify_jobs(parse_recipe(text, "kinder.toml", str(yard)))


def test_a_model_learns_from_the_half_of_its_texts(yard: Path) -> None:
    every = jobs(yard)
    base, own = str(yard / "small/checkpoint"), yard / "kinder"
    assert every.generate.document["load"] == base
    assert every.score.document["input"] == [f"{own}/self-generated/generations.jsonl"]
    assert every.score.document["keep_fraction"] == 0.5
    assert every.tokenize.document["input"] == [f"{own}/scored/documents-*.jsonl"]
    trained = every.pretrain.document
    assert trained["train_data_path"] == [f"{own}/tokens/kept_generated_text_document"]
    assert trained["valid_data_path"] == [f"{yard}/small/tokens/corpus_text_document"]
    assert (trained["load"], trained["finetune"], trained["num_layers"]) == (base, True, 2)
    for name in ("tokenizer_type", "tokenizer_model"):
        assert every.tokenize.document.get(name) == trained.get(name)


def test_it_is_measured_alike_before_and_after(yard: Path) -> None:
    every = jobs(yard)
    names = [job.name for job in every.all()]
    assert names == [
        *("continue-before", "score-before", "evaluate-before"),
        *("generate", "score", "tokenize", "pretrain"),
        *("continue-after", "score-after", "evaluate-after", "report"),
    ]
    places = {"load", "output_dir", "input"}
    for one, other in zip(
        (every.before.generate, every.before.score, every.before.evaluate),
        (every.after.generate, every.after.score, every.after.evaluate),
        strict=True,
    ):
        differs = {k for k, v in one.document.items() if v != other.document[k]}
        assert "output_dir" in differs
        assert differs <= places
    assert every.after.generate.document["load"] == str(yard / "kinder/checkpoint")
    assert "keep_fraction" not in every.after.score.document
    assert every.after.score.document["prompt_path"] == "prompts.jsonl"
    assert every.report.document["toxicity_after"] == every.after.score.document["output_dir"]


def test_the_recipe_in_the_repository_is_valid(yard: Path) -> None:
    path = str(ROOT / "recipes" / "detoxify_quickstart.toml")
    assert detoxify_jobs(read_recipe(path, str(yard))).all()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('base = "small"', "", r"which model is to be trained\? Give base = \"quickstart\""),
        ('base = "small"', 'base = "absent"', r"\[pretrain\]: --load .*absent/checkpoint: no ch"),
        ('"ngrams"\nclassifier_data = "labels.jsonl"', '"annotated"', "what the flow generates"),
        ("keep_fraction = 0.5\n", "", r"\[score\]: keep_fraction is needed"),
        ("keep_f", 'prompt_path = "p.jsonl"\nkeep_f', r"and give the prompts as \[continuations\]"),
        ("keep_f", "world_size = 2\nkeep_f", r"\[score\]: world_size is decided by the flow"),
        ("keep_f", "rank = 0\nkeep_f", r"\[score\]: rank is decided by the flow"),
        ('prompt_file = "prompts.jsonl"', 'prompts = ["a"]', "prompt_file is needed"),
        ("lr =", 'train_data_path = ["a"]\nlr =', "train_data_path is decided by the flow"),
        ("[evaluate]", "[evaluate]\nload = 'x'", "load is decided by the flow"),
    ],
)
def test_a_recipe_that_cannot_be_run_is_refused(
    yard: Path, before: str, after: str, message: str
) -> None:
    with pytest.raises((ConfigError, ArtifactError), match=message):
        jobs(yard, TINY.replace(before, after))
