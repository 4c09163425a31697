"""The evaluate stage: the known line, and numbers that a forward pass confirms."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from stages.evaluate.config import EvaluateConfig
from stages.evaluate.inputs import check_inputs
from stages.evaluate.run import run
from tests.stages.directly import run_directly, run_process
from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from trainyard.artifacts import store
from trainyard.artifacts.inputs import resolve
from trainyard.config import from_dict
from trainyard.errors import ConfigError, DataError
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel

MODEL = GPTConfig(num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=32)
TEXT = "The yard , which shunts 1 @,@ 234 trains , is large . \n"


@pytest.fixture(scope="module")
def model() -> GPTModel:
    return random_gpt(MODEL)


@pytest.fixture(scope="module")
def checkpoint(model: GPTModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("run"))
    save_gpt(folder, model, step=50)
    return folder


def evaluate(checkpoint: str, data: str, out: str, **options: Any) -> dict[str, Any]:
    options = {"overlapping_eval": 8, "device": "cpu"} | options
    run_directly(
        EvaluateConfig,
        run,
        load=checkpoint,
        valid_data=[data],
        task="WIKITEXT103",
        output_dir=out,
        **options,
    )
    return results_of(out)


def results_of(out: str) -> dict[str, Any]:
    """The results of the only data set, and what they share."""
    document: dict[str, Any] = store.read_json(store.join(out, "results.json"))
    (only,) = document.pop("sets")
    return {**document, **only}


def test_a_text_of_one_window_has_the_loss_of_the_model(
    model: GPTModel, checkpoint: str, store_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = store.join(store_url, "held.txt")
    store.write_bytes(data, b"the yard shunts trains")
    results = evaluate(checkpoint, data, store.join(store_url, "out"))
    tokens = torch.tensor([_ids("the yard shunts trains")])
    with torch.no_grad():
        loss = functional.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:]).item()
    assert results["avg_loss"] == pytest.approx(loss, rel=1e-5)
    assert results["num_tokens"] == results["num_bytes"] == 22
    assert results["num_original_tokens"] == 4
    assert results["token_ratio"] == 21 / 3
    assert results["adjusted_ppl"] == pytest.approx(math.exp(min(20.0, loss * 7)), rel=1e-4)
    assert results["passport"]["protocol"]["definition"]["detokenizer"] == "none"
    assert results["step"] == 50
    number = r"\d\.\d{4}E[+-]\d\d"
    line = (
        rf" validation results on WIKITEXT103 \| avg loss: {number} \| ppl: {number} \| "
        rf"adjusted ppl: {number} \| token ratio: 7\.0 \|"
    )
    assert re.fullmatch(line, capsys.readouterr().out.rstrip("\n"))


def _ids(text: str) -> list[int]:
    from tokenizers import Tokenizer

    from tests.trainyard.checkpoint.samples import tokenizer_files

    ids: list[int] = (
        Tokenizer.from_str(tokenizer_files()["tokenizer/tokenizer.json"].decode()).encode(text).ids
    )
    return ids


def test_wikitext_is_detokenized_after_the_word_count(checkpoint: str, tmp_path: Path) -> None:
    data = tmp_path / "wiki.test.tokens"
    data.write_text(TEXT * 20)
    results = evaluate(checkpoint, str(data), str(tmp_path / "a"))
    assert results["passport"]["protocol"]["definition"]["detokenizer"] == "wikitext"
    assert results["num_original_tokens"] == len((TEXT * 20).strip().split(" "))
    assert results["num_bytes"] < len(TEXT * 20)
    one = evaluate(checkpoint, str(data), str(tmp_path / "one"), micro_batch_size=1)
    assert one["avg_loss"] == pytest.approx(results["avg_loss"], rel=1e-6), "not of the batch size"
    plain = evaluate(checkpoint, str(data), str(tmp_path / "b"), detokenizer="none")
    assert plain["num_bytes"] == len(TEXT * 20)


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_any_line_end_gives_the_same_results(checkpoint: str, tmp_path: Path, end: str) -> None:
    for name, line_end in (("here", "\n"), ("there", end)):
        (tmp_path / name).mkdir()
        data = tmp_path / name / "wiki.test.tokens"
        data.write_bytes((TEXT * 5).replace("\n", line_end).encode())
        evaluate(checkpoint, str(data), str(tmp_path / name / "out"))
    here, there = ((tmp_path / n / "out/results.json").read_text() for n in ("here", "there"))
    of_data = [json.loads(text)["sets"][0]["passport"]["data"]["digest"] for text in (here, there)]
    assert here.replace(*of_data) == there
    assert str(tmp_path) not in here
    assert set(json.loads(here)["sets"][0]) >= {"avg_loss", "ppl", "adjusted_ppl", "bits_per_byte"}


def test_an_invalid_text_is_refused(checkpoint: str, tmp_path: Path) -> None:
    out, bad, empty = str(tmp_path / "out"), tmp_path / "bad.txt", tmp_path / "empty.txt"
    bad.write_bytes(b"good \xff bad")
    empty.write_bytes(b"")
    with pytest.raises(DataError, match=r"bad\.txt: byte 5 is not UTF-8"):
        evaluate(checkpoint, str(bad), out)
    with pytest.raises(DataError, match=r"empty\.txt: 1 words and 0 tokens"):
        evaluate(checkpoint, str(empty), out)
    with pytest.raises(ConfigError, match="--seq-length 64 is longer than the 32 positions"):
        evaluate(checkpoint, str(bad.parent / "empty.txt"), out, seq_length=64)
    assert not Path(out).exists()


def test_a_corpus_that_is_no_token_files_is_refused_before_the_checkpoint_is_read(
    tmp_path: Path,
) -> None:
    corpus = {"contamination_corpus": [str(tmp_path / "corpus.txt")]}
    given = {"load": "none", "valid_data": ["a.jsonl"], "task": "LAMBADA", **corpus}
    with pytest.raises(DataError, match=r"there is no .*corpus.txt.bin; name the prefix"):
        check_inputs(from_dict(EvaluateConfig, given))


def test_several_data_sets_are_scored_apart_each_with_its_passport(
    checkpoint: str, tmp_path: Path
) -> None:
    lines = {"a": ["the yard", "a train"], "b": ["trains shunt"]}
    for name, texts in lines.items():
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )
    paths = [str(tmp_path / f"{name}.jsonl") for name in lines]
    out = str(tmp_path / "out")
    metrics = run_directly(
        EvaluateConfig, run, load=checkpoint, valid_data=paths, task="LAMBADA", output_dir=out
    )
    assert metrics["a.jsonl/num_examples"] == 2
    document = store.read_json(store.join(out, "results.json"))
    assert [one["name"] for one in document["sets"]] == ["a.jsonl", "b.jsonl"]
    for one, path in zip(document["sets"], paths, strict=True):
        passport = one["passport"]
        assert passport["data"]["digest"] == resolve("x", [path]).digest
        assert passport["checkpoint"]["step"] == 50
        assert passport["tokenizer"]["vocab_size"] == 257
        assert passport["protocol"]["name"] == "LAMBADA/megatron"
        figure = passport["figures"]["accuracy"]
        assert (figure["value"], figure["count"]) == (one["accuracy"], one["num_examples"])
        rows = [json.loads(line) for line in Path(out, one["rows"]).read_text().splitlines()]
        assert [row["example"] for row in rows] == list(range(one["num_examples"]))
    first, second = document["sets"]
    assert first["passport"]["protocol"] == second["passport"]["protocol"]
    assert first["passport"]["figures"]["accuracy"]["stderr"] is not None
    assert second["passport"]["figures"]["accuracy"]["stderr"] is None  # of one example


@pytest.mark.slow
@pytest.mark.distributed
def test_the_command_on_several_ranks_gives_the_scores_of_one(
    checkpoint: str, tmp_path: Path
) -> None:
    data = tmp_path / "held.txt"
    data.write_text("The yard shunts trains. " * 200)
    alone = evaluate(checkpoint, str(data), str(tmp_path / "alone"))
    printed = run_process(
        "stages.megatron",
        *("tasks/main.py", "--task", "WIKITEXT103", "--load", checkpoint, "--fp16"),
        *("--valid-data", str(data), "--overlapping-eval", "8", "--micro-batch-size", "3"),
        *("--nproc-per-node", "4", "--tensor-model-parallel-size", "2", "--num-layers", "2"),
        *("--device", "cpu", "--output-dir", str(tmp_path / "ranks")),
    )
    assert " validation results on WIKITEXT103 | avg loss: " in printed
    found = results_of(str(tmp_path / "ranks"))
    assert found["avg_loss"] == pytest.approx(alone["avg_loss"], rel=1e-6)
    assert found["passport"]["data"] == alone["passport"]["data"]


# --- questions --------------------------------------------------------------------------------


def answer(checkpoint: str, data: Path, out: Path, **options: Any) -> dict[str, Any]:
    options = {"task": "nq", "device": "cpu", "out_seq_length": 4, "short_format": True} | options
    run_directly(
        EvaluateConfig, run, load=checkpoint, valid_data=[str(data)], output_dir=str(out), **options
    )
    return results_of(str(out))


def test_questions_are_answered_by_generation_and_scored(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "nq_QA_test.json"
    asked = [{"question": f"the {n}?", "answers": ["yard"], "ctxs": []} for n in range(5)]
    data.write_text(json.dumps(asked))
    answer(checkpoint, data, tmp_path / "a", ft_neighbours=0)
    rows = [json.loads(line) for line in (tmp_path / "a" / "predictions.jsonl").open()]
    assert [row["question"] for row in rows] == [one["question"] for one in asked]
    # With the first answer of the model as the truth, that one question is right.
    asked[1]["answers"] = ["no", rows[1]["pred"]]
    data.write_text(json.dumps(asked))
    found = answer(checkpoint, data, tmp_path / "b", ft_neighbours=0)
    assert (found["num_questions"], found["exact_match"]) == (5, 0.2)
    part = answer(checkpoint, data, tmp_path / "c", ft_neighbours=0, gen_start_idx=1, num_gen=1)
    assert (part["num_questions"], part["exact_match"]) == (1, 1.0)
    assert "Exact Match: 1.0000;" in capsys.readouterr().out
    # The same questions under other keys, as a document describes them.
    described = tmp_path / "task.json"
    described.write_text(
        json.dumps({"name": "mine", "ask": "{}", "keys": {"question": "q", "answers": "a"}})
    )
    data.write_text(json.dumps([{"q": one["question"], "a": one["answers"]} for one in asked]))
    same = answer(
        checkpoint,
        data,
        tmp_path / "d",
        ft_neighbours=0,
        task="QA",
        task_description=str(described),
    )
    assert same["exact_match"] == found["exact_match"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "WIKITEXT103"}, "--task WIKITEXT103 asks no questions"),
        ({"task": "QA"}, "--task QA and --task-description go together"),
        ({"strict_lambada": True}, "--strict-lambada only applies with --task LAMBADA"),
        ({"vocab_file": "v"}, "are the files of a tokenizer; give --tokenizer-type too"),
        ({"out_seq_length": 32}, "--out-seq-length 32 leaves no room"),
        ({"gen_start_idx": 7}, "--gen-start-idx 7 and --num-gen -1 choose none of the 1"),
        ({"task": "QA", "task_description": "BAD"}, "unknown key 'nam'; known are name"),
    ],
)
def test_questions_that_cannot_be_asked_are_refused(
    checkpoint: str, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    (tmp_path / "q.json").write_text('[{"question": "a?", "answers": ["b"]}]')
    (tmp_path / "bad.json").write_text('{"nam": 1, "name": "x"}')
    named = {k: str(tmp_path / "bad.json") if v == "BAD" else v for k, v in options.items()}
    with pytest.raises(ConfigError, match=message):
        answer(checkpoint, tmp_path / "q.json", tmp_path / "out", **named)


def test_squads_layout_is_asked_with_its_paragraph(checkpoint: str, tmp_path: Path) -> None:
    paragraph = {"context": "c" * 9, "qas": [{"question": "q?", "answers": [{"text": "a"}]}] * 2}
    data = tmp_path / "dev.json"
    data.write_text(json.dumps({"data": [{"title": "t", "paragraphs": [paragraph]}]}))
    found = answer(checkpoint, data, tmp_path / "a", task="squad")
    assert found["num_questions"] == 2
    rows = [json.loads(line) for line in (tmp_path / "a" / "predictions.jsonl").open()]
    assert [row["answers"] for row in rows] == [["a"], ["a"]]
    data.write_text(json.dumps({"data": [{"paragraphs": [{"qas": []}]}]}))
    with pytest.raises(DataError, match="article 0, from 0: a paragraph has no string 'context'"):
        answer(checkpoint, data, tmp_path / "b", task="squad")
