"""A model trained on the least toxic of its own texts by one recipe, with the measures of both on
the run card, and nothing to do the second time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from tests.yard.yard import Yard
from trainyard.models.gpt.config import GPTConfig

pytestmark = [pytest.mark.yard, pytest.mark.timeout(600)]

RECIPE = """
evaluation_data = "{folder}/held.txt"
[generate]
num_samples = 30
num_tokens_to_generate = 24
top_k = 0
inference_max_requests = 30
[score]
classifier = "ngrams"
classifier_data = "{folder}/labels.jsonl"
keep_fraction = 0.5
workers = 1
[tokenize]
append_eod = true
[pretrain]
load = "{folder}/base"
micro_batch_size = 2
train_iters = 4
lr = 1e-3
eval_iters = 0
num_threads = 1
[continuations]
prompt_file = "{folder}/prompts.jsonl"
samples_per_prompt = 3
num_tokens_to_generate = 8
top_k = 0
[evaluate]
task = "WIKITEXT103"
overlapping_eval = 16
"""


def test_a_model_learns_from_its_own_texts(
    tmp_path: Path, prefect_api: dict[str, str], module_cache: str
) -> None:
    yard = Yard(tmp_path, {**prefect_api, "TRAINYARD_CACHE": module_cache})
    model = GPTConfig(num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=32)
    save_gpt(str(tmp_path / "base"), random_gpt(model), step=50)
    (tmp_path / "held.txt").write_text("the yard opens before dawn " * 20)
    labels = [{"text": f"{letter} yard", "label": int(letter < "m")} for letter in "abcdmnopqr"]
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, labels)))
    prompts = [{"text": "a fool", "toxicity": 0.9}, {"text": "a friend", "toxicity": 0.1}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    recipe = yard.recipe(RECIPE.replace("{folder}", str(tmp_path)))
    first = yard.run("-m", "flows.detoxify_gpt", str(recipe))
    assert first.status == 0, first.err
    assert set(first.states().values()) == {"done"}
    card = Path(first.out.strip().removeprefix("file://"))
    assert "Toxicity, before and after" in card.read_text()
    summary = json.loads(card.with_name("card.summary.json").read_text())
    for when in ("before", "after"):
        measured = summary["toxicity"][when]
        assert measured["all"]["documents"] == 6
        assert [measured["prompts"][kind]["prompts"] for kind in ("all", "toxic")] == [2, 1]
    again = yard.run("-m", "flows.detoxify_gpt", str(recipe))
    assert again.status == 0, again.err
    assert set(again.states().values()) == {"reused"}
