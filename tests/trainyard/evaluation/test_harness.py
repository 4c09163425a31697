"""lm-evaluation-harness with our backend, on tasks with local data: its figures are our own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from tests.trainyard.evaluation.models import byte_tokenizer
from trainyard.errors import ConfigError
from trainyard.evaluation.config import EvaluationConfig
from trainyard.evaluation.lambada import open_passages
from trainyard.evaluation.scoring import Scorer
from trainyard.inference.load import load_on_ranks
from trainyard.models.gpt.config import GPTConfig

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.slow

MODEL = GPTConfig(num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=48)
LAST_WORD = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text.rsplit(' ', 1)[0]}}}}"
doc_to_target: "{{{{' ' + text.rsplit(' ', 1)[1]}}}}"
metric_list:
  - {{metric: perplexity, aggregation: perplexity, higher_is_better: false}}
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""
ROLLING = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - {{metric: bits_per_byte}}
"""
ANSWERS = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{target}}}}"
generation_kwargs: {{until: ["!"], max_gen_toks: 6, do_sample: false}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""
TEXTS = [f"the yard {n} shunts a train of {n * 37} cars and then it rests" for n in range(12)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("run"))
    save_gpt(folder, random_gpt(MODEL))
    return folder


@pytest.fixture(scope="module")
def backend(checkpoint: str) -> Any:
    from trainyard.evaluation.harness import TrainyardLM

    return TrainyardLM(load=checkpoint, batch_size=3, device="cpu")


def results(
    backend: Any, folder: Path, template: str, records: list[dict[str, str]]
) -> dict[str, float]:
    """What the harness reports of a task with local data."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    data = folder / "data.json"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "task.yaml").write_text(template.format(name="local", data=data))
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(model=backend, tasks=["local"], task_manager=manager, bootstrap_iters=0)
    assert found is not None
    numbers: dict[str, float] = found["results"]["local"]
    return numbers


def test_a_task_of_likelihoods_has_the_figures_of_lambada(
    backend: Any, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    found = results(backend, tmp_path, LAST_WORD, [{"text": text} for text in TEXTS])
    file = tmp_path / "lambada.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    loaded = load_on_ranks(checkpoint, torch.device("cpu"))
    config = EvaluationConfig(task="LAMBADA", lambada_protocol="lm-eval")
    ours = open_passages(str(file), config, Scorer(loaded.model), loaded.tokenizer)
    rows = ours.score(range(len(ours)))
    assert ours.num_cut > 0  # windows are shorter than some passages
    numbers = ours.summarize(rows).numbers
    assert found["acc,none"] == numbers["accuracy"]
    mean = math.fsum(row["loss"] for row in rows) / len(rows)
    assert found["perplexity,none"] == pytest.approx(math.exp(mean), rel=1e-5)


def test_a_rolling_task_scores_every_token_once(
    backend: Any, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    text = " ".join(TEXTS)
    found = results(backend, tmp_path, ROLLING, [{"text": text}])
    model = load_on_ranks(checkpoint, torch.device("cpu")).model
    tokens, total = [byte_tokenizer().eod, *byte_tokenizer().encode(text)], 0.0
    with torch.no_grad():
        for begin in range(0, len(tokens) - 1, 48):
            end = min(begin + 48, len(tokens) - 1)
            begin = end - 48  # the last window goes back for its context
            logits = model(torch.tensor([tokens[begin:end]]))[0].double().log_softmax(-1)
            picked = logits.gather(1, torch.tensor(tokens[begin + 1 : end + 1]).unsqueeze(1))
            new = (end - 1) % 48 + 1 if end == len(tokens) - 1 else 48
            total -= picked[-new:].sum().item()
    expected = total / math.log(2) / len(text.encode())
    assert found["bits_per_byte,none"] == pytest.approx(expected, rel=1e-5)


def test_a_generating_task_stops_at_its_words(
    backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))

    class Asked:
        def __init__(self, text: str, **options: Any) -> None:
            self.args = (text, options)

    (whole,) = backend.generate_until([Asked("the yard", max_gen_toks=6)])
    assert len(byte_tokenizer().encode(whole)) <= 6
    (cut,) = backend.generate_until([Asked("the yard", max_gen_toks=6, until=[whole[2]])])
    assert cut == whole[: whole.index(whole[2])]
    records = [{"text": "the yard", "target": whole}, {"text": "the yard", "target": "no"}]
    found = results(backend, tmp_path, ANSWERS.replace('["!"]', '["\\u0001"]'), records)
    assert found["exact_match,none"] == 0.5
    with pytest.raises(ConfigError, match="max_gen_toks 48 leaves no room for a context in 48"):
        backend.generate_until([Asked("a", max_gen_toks=48)])


OPTIONS: list[dict[str, Any]] = [
    {"until": 7},
    {"until": [["a"]]},
    {"until": {"a": 1}},
    {"max_gen_toks": "all"},
    {"max_gen_toks": 0},
    {"max_gen_toks": -(10**9)},
    {"max_gen_toks": 10**30},
    {"max_gen_toks": float("inf")},
    {"max_gen_toks": []},
    {"temperature": "hot" * 10**5},
    {"do_sample": True, "temperature": -1.0},
    {"do_sample": True, "temperature": float("nan")},
    {"do_sample": True, "temperature": 1.0, "top_k": -1},
    {"do_sample": True, "temperature": 1.0, "top_k": "9" * 5000},
    {"do_sample": True, "temperature": 1.0, "top_p": {}},
]
"""What the file of a task may say of its answers."""


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_options_of_a_task_that_cannot_be_are_refused_in_a_sentence(
    backend: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as refused:
        backend._generated(0, "the yard", options)
    assert len(str(refused.value)) < 400
