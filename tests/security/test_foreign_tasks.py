"""Questions, choices, prompts and evaluation sets that others wrote end in a sentence, soon."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from stages import lm_eval
from tests.security.test_broken_documents import BROKEN
from trainyard.collection.contamination.tasks import BY_ENDING, READERS, read_task
from trainyard.datasets.classification.glue import read_pairs
from trainyard.datasets.classification.race import read_race
from trainyard.datasets.fine_tuning.conversations import ConversationFile
from trainyard.datasets.fine_tuning.questions import PromptFormat, Question, Wording
from trainyard.errors import ConfigError, TrainyardError
from trainyard.evaluation.choices import read_choices
from trainyard.evaluation.config import QuestionConfig
from trainyard.evaluation.questions import question_task, read_questions
from trainyard.inference.prompts import read_prompts
from trainyard.load_test.workload import read_trace

SOON_SECONDS = 20
"""On a busy machine; what stalls takes minutes."""

Reader = Callable[[str], Any]


def questions(url: str) -> Any:
    return read_questions(url, question_task("nq", None), QuestionConfig())


def of_task(name: str) -> Reader:
    return lambda url: list(read_task(name, [url]))


READ: dict[str, tuple[str, Reader]] = {
    "description of a task": ("task.json", lambda url: question_task("QA", url)),
    "questions": ("asked.jsonl", questions),
    "a list of questions": ("asked.json", questions),
    "choices": ("choices.jsonl", read_choices),
    "pairs": ("pairs.tsv", read_choices),
    "conversations": ("chat.jsonl", lambda url: [*map(ConversationFile(url).__getitem__, (0,))]),
    "prompts": ("prompts.jsonl", lambda url: read_prompts((), url, "text")),
    "pairs of MNLI": ("train.tsv", lambda url: read_pairs(url, "MNLI")),
    "pairs of QQP": ("train.tsv", lambda url: read_pairs(url, "QQP")),
    "articles of RACE": ("1.txt", lambda url: read_race(str(Path(url).parent))),
    "a trace of requests": ("trace.jsonl", lambda url: read_trace(Path(url).read_bytes(), url)),
    "prompts of lines": ("prompts.txt", lambda url: read_prompts((), url, "text")),
    **{f"set of {name}": (f"{name}.json", of_task(name)) for name in READERS},
    **{f"set in {ending}": (f"mine{ending}", of_task("mine")) for ending in BY_ENDING},
}
"""By surface: a name for its file, and what reads it."""

HEADS = "index\tquestion\tsentence1\tsentence2\tquestion1\tquestion2\tsentence\n"
HOSTILE = {
    **BROKEN,
    "bytes": "\udcff\udcfe\udc80",
    "half a character": '{"text": "\\ud800", "question": "\\udfff", "query": "\\ud800"}',
    "NUL": HEADS + "a\0b\t" * 12,
    "a field of a megabyte": HEADS + "\t".join(["x" * 2**20] * 8),
    "a thousand columns": "\t".join(["sentence"] * 1000) + "\n" + "\t" * 1000,
    "quotes": HEADS + '"' * 1001,
    "texts that are tables": json.dumps({key: {} for key in ("text", "question", "query")}),
    "texts that are lists": json.dumps({key: [[], 1] for key in ("text", "question", "prompt")}),
    "SQuAD of tables": '{"data": {"paragraphs": {"qas": {}}}}',
    "SQuAD of texts": '{"data": "abc"}',
    "SQuAD of lists": '{"data": [{"paragraphs": [{"context": "x", "qas": [[]]}]}]}',
    "no answers": json.dumps({"question": "q", "answers": {"a": []}, "query": "q", "choices": []}),
    "gold beyond": json.dumps({"query": "q", "choices": ["a"], "gold": 10**400}),
    "gold below": json.dumps({"query": "q", "choices": ["a"], "gold": -1}),
    "a key of escapes": json.dumps({"\x1b]0;owned\x07": 1}),
    "neighbors": json.dumps({"text": "x", "neighbors": [[{}]]}),
    "a million lines": '{"text": ""}\n' * 10**5,
    "a class of escapes": HEADS + "\t".join(["a"] * 11) + "\x1b]0;owned\x07\n",
    "an answer beyond the options": json.dumps(
        {"article": "a", "questions": ["q"], "options": [["x", "y"]], "answers": ["\u202e"]}
    ),
    "a time that is none": '{"timestamp": NaN, "text_input": "a"}',
    "a time beyond doubles": '{"timestamp": 1e999, "text_input": "a"}',
    "a prompt of gigabytes": '{"timestamp": 0, "input_length": 2147483647}',
    "a length of escapes": '{"timestamp": 0, "input_length": "\\u001b]0;owned"}',
    "a time of a megabyte": json.dumps({"timestamp": "9" * 2**20, "text_input": "a"}),
    "a length of a megabyte": json.dumps({"timestamp": 0, "input_length": "9" * 2**20}),
    "blocks below zero": '{"timestamp": 0, "input_length": 1, "hash_ids": [-1]}',
    "a format": json.dumps({"name": "x", "ask": "{} {0.__class__}"}),
    "a wide format": json.dumps({"name": "x", "ask": "{} {:>9999999999}"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("surface", READ)
def test_a_hostile_file_is_read_or_refused_in_a_sentence(surface: str, tmp_path: Path) -> None:
    name, read = READ[surface]
    path = tmp_path / name
    for what, text in HOSTILE.items():
        path.write_bytes(text.encode(errors="surrogateescape"))
        began, words = time.thread_time(), str(path)
        try:
            read(str(path))
        except TrainyardError as error:
            words = str(error)
        assert words.startswith((str(path), f"--task-description {path}")), what
        assert len(words) < 2000, what
        assert "\n" not in words, what
        assert time.thread_time() - began < SOON_SECONDS, what


class Characters:
    """A tokenizer whose tokens are the characters."""

    def encode(self, text: str) -> list[int]:
        return [*map(ord, text)]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))


def test_a_wording_is_no_format() -> None:
    """Else it could ask for a text of gigabytes, or look into an object."""
    ask = "{} {0.__class__} {:>9999999999}"
    prompt_format = PromptFormat(task="x", wording=Wording("", {"long": ask}, {"long": ("x",)}))
    prompt = prompt_format.prompt(Question("why", ("",), ()), Characters(), 900)
    assert "why {0.__class__} {:>9999999999}" in Characters().decode(prompt)


@pytest.mark.parametrize("words", [["--tasks", "a"], ["run", "--model", "trainyard"]])
def test_the_harness_trusts_no_program_of_a_data_set(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="--trust_remote_code runs Python that comes with"):
        lm_eval.arguments([*words, "--trust_remote_code"])
