"""Question answering by generation: prompts with contexts, answers by the static engine, exact
match and F1 (`answers`).

A task is one of InstructRetro's, or described by a JSON document:

    {"name": "pubmed", "answer": "long",
     "system": "System: Answer from the article.\\n\\n",      optional: InstructRetro's
     "ask": "Explain in full. {}",                           optional: by the kind of answer
     "keys": {"question": "query", "answers": "gold", "ctxs": "passages"}}   optional"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from trainyard import json_text
from trainyard.artifacts.inputs import read_checked
from trainyard.config import digest_relevant
from trainyard.datasets.fine_tuning.conversations import ConversationFile
from trainyard.datasets.fine_tuning.questions import (
    GPT_WORDING,
    Kind,
    PromptFormat,
    Question,
    Wording,
    read_question,
)
from trainyard.datasets.fine_tuning.squad import squad_records
from trainyard.datasets.plain_text import PlainText
from trainyard.errors import ConfigError, DataError
from trainyard.evaluation.answers import exact_match, token_scores
from trainyard.evaluation.config import EvaluationConfig, QuestionConfig
from trainyard.evaluation.examples import ProtocolId
from trainyard.evaluation.generation import generated
from trainyard.evaluation.metrics import Metric, Row, Summary
from trainyard.evaluation.scoring import Scorer
from trainyard.tokenizers.base import Tokenizer

PROMPTS = {"nq": "nq", "triviaqa": "tqa", "squad": "squad1.1"}
"""Tasks, and the data sets of `fine_tuning.questions` whose prompts they have."""
KEYS = ("name", "answer", "system", "ask", "keys")
RENAMED = ("question", "answers", "ctxs", "sub-paragraphs")
END_OF_TEXT = "<|endoftext|>"

METRICS = {name: Metric(name) for name in ("exact_match", "precision", "recall", "f1")}
"""F1, precision and recall exclude questions with an empty answer."""


@dataclass(frozen=True, slots=True)
class QuestionTask:
    """How the questions of a data set are read and asked."""

    name: str
    wording: Wording = GPT_WORDING
    keys: dict[str, str] = field(default_factory=dict)
    """Keys of records, by the names that `read_question` knows."""


def question_task(task: str, description: str | None) -> QuestionTask:
    """The task of a name, or of a JSON document at a URL. ConfigError says what is wrong there."""
    if description is None:
        return QuestionTask(PROMPTS[task])
    try:
        document = json_text.loads(read_checked(description))
        return _described(document)
    except ValueError as error:
        raise ConfigError(f"--task-description {description}: {error}") from None


def _described(document: Any) -> QuestionTask:
    if not isinstance(document, dict) or not isinstance(document.get("name"), str):
        raise ValueError("not an object with a name")
    if strangers := sorted(document.keys() - set(KEYS)):
        raise ValueError(f"unknown key {strangers[0]!r}; known are {', '.join(KEYS)}")
    kind, keys = document.get("answer", "short"), document.get("keys", {})
    if kind not in get_args(Kind):
        raise ValueError(f"answer is {kind!r}; known are {', '.join(get_args(Kind))}")
    if not isinstance(keys, dict) or not set(keys) <= set(RENAMED):
        raise ValueError(f"keys must be an object that renames some of {', '.join(RENAMED)}")
    system = document.get("system", GPT_WORDING.system)
    ask = document.get("ask", GPT_WORDING.asks.get(kind, "{}"))
    if not isinstance(system, str) or not isinstance(ask, str) or ask.count("{}") != 1:
        raise ValueError("system and ask must be texts, and ask has one {} for the question")
    name = document["name"]
    return QuestionTask(name, Wording(system, {kind: ask}, {kind: (name,)}), dict(keys))


def read_questions(url: str, task: QuestionTask, config: QuestionConfig) -> list[Question]:
    """The questions from --gen-start-idx on, --num-gen of them. DataError names a record that is
    none."""
    records = squad_records(url)
    file = ConversationFile(url) if records is None else None
    count = len(file) if file is not None else len(records or ())
    end = count if config.num_gen < 0 else config.gen_start_idx + config.num_gen
    chosen = range(count)[config.gen_start_idx : end]
    if not chosen:
        raise ConfigError(
            f"--gen-start-idx {config.gen_start_idx} and --num-gen {config.num_gen} choose none of "
            f"the {count} questions of {url}"
        )
    if file is not None:
        return [_question(file.record(n), file.where(n), task, config) for n in chosen]
    assert records is not None
    return [_question(records[n], f"{url}: question {n}, from 0", task, config) for n in chosen]


def _question(
    record: dict[str, Any], where: str, task: QuestionTask, config: QuestionConfig
) -> Question:
    renamed = {name: record[key] for name, key in task.keys.items() if key in record}
    try:
        return read_question(record | renamed, config.contexts, config.longform_answer)
    except ValueError as fault:
        raise DataError(f"{where}: {fault}") from None


@dataclass(frozen=True, slots=True)
class Questions:
    """The questions of a data set; implements `examples.Examples`."""

    scorer: Scorer
    tokenizer: Tokenizer
    questions: Sequence[Question]
    config: QuestionConfig
    format: PromptFormat
    batch_size: int
    room: int
    """Tokens of a prompt, at most."""
    protocol: ProtocolId
    unit: str = "questions"

    def __len__(self) -> int:
        """Questions."""
        return len(self.questions)

    def score(self, numbers: range) -> list[Row]:
        """The answers, and how they compare."""
        plain = PlainText(self.tokenizer)
        rows: list[Row] = []
        for first in range(numbers.start, numbers.stop, self.batch_size):
            batch = self.questions[first : min(first + self.batch_size, numbers.stop)]
            room = self.room - len(plain.before)
            prompts = [
                [*plain.before, *self.format.prompt(question, plain, room)[-room:]]
                for question in batch
            ]
            outputs = generated(
                self.scorer.model,
                self.tokenizer,
                prompts,
                self.config.out_seq_length,
                self.config.sampling,
                first,
                self.scorer.groups,
            )
            for number, question, output in zip(
                range(first, first + len(batch)), batch, outputs, strict=True
            ):
                rows.append(row_of(number, question, _one_line(self.tokenizer.decode(output))))
        return rows

    def summarize(self, rows: Sequence[Row]) -> Summary:
        """Means over the questions."""
        return summarize(rows)

    def texts(self) -> list[str]:
        """The questions, each with its first answer."""
        return [f"{one.text} {one.answers[0] if one.answers else ''}" for one in self.questions]

    def line(self, task: str, numbers: Mapping[str, Any]) -> str:
        """The lines of Megatron-LM's evaluate.py."""
        return (
            f"Method: {task}; Precision: {numbers['precision']:.4f}; "
            f"recall: {numbers['recall']:.4f}; f1: {numbers['f1']:.4f}\n"
            f"Exact Match: {numbers['exact_match']:.4f};"
        )


def open_questions(
    url: str,
    evaluation: EvaluationConfig,
    config: QuestionConfig,
    scorer: Scorer,
    tokenizer: Tokenizer,
) -> Questions:
    """The questions of a file. ConfigError if answers leave no room for a prompt."""
    task = question_task(evaluation.task, config.task_description)
    model = scorer.model.config
    length = min(evaluation.seq_length or model.seq_length, model.positions)
    room = length - config.out_seq_length
    if room < 1:
        raise ConfigError(
            f"--out-seq-length {config.out_seq_length} leaves no room for a prompt in --seq-length "
            f"{length}; shorten it"
        )
    prompt_format = PromptFormat(
        task=task.name,
        wording=task.wording,
        num_contexts=config.ft_neighbours,
        short_format=config.short_format,
        template_id=config.template_id,
    )
    definition = {
        "version": 1,
        "length": length,
        "system": task.wording.system,
        "asks": dict(task.wording.asks),
        "keys": task.keys,
        **digest_relevant(config),
    }
    protocol = ProtocolId(f"{evaluation.task}/{task.name}", definition)
    questions = read_questions(url, task, config)
    return Questions(
        *(scorer, tokenizer, questions, config, prompt_format, evaluation.micro_batch_size),
        *(room, protocol),
    )


def _one_line(text: str) -> str:
    return text.partition(END_OF_TEXT)[0].strip().replace("\n", " ")


def row_of(number: int, question: Question, prediction: str) -> Row:
    """A question with its answer and scores. F1 is that of the first right answer; None if that is
    empty."""
    scores = token_scores(prediction, question.answers[0]) if question.answers else None
    return {
        "example": number,
        "question": question.text,
        "pred": prediction,
        "answers": list(question.answers),
        "exact_match": int(exact_match(prediction, question.answers)),
        **(dict.fromkeys(("precision", "recall", "f1")) if scores is None else scores._asdict()),
    }


def summarize(rows: Sequence[Row]) -> Summary:
    """Means over the questions; 0 where none takes part."""
    figures = {name: metric.document(rows)["value"] or 0.0 for name, metric in METRICS.items()}
    counts = {
        "num_questions": len(rows),
        "num_scored": sum(row["f1"] is not None for row in rows),
    }
    return Summary({**counts, **figures}, METRICS)
