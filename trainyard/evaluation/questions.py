"""Question answering by generation: prompts with contexts, answers by the static engine, exact
match and F1 (`answers`).

A task is one of InstructRetro's, or described by a JSON document:

    {"name": "pubmed", "answer": "long",
     "system": "System: Answer from the article.\\n\\n",      optional: InstructRetro's
     "ask": "Explain in full. {}",                           optional: by the kind of answer
     "keys": {"question": "query", "answers": "gold", "ctxs": "passages"}}   optional"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from trainyard import json_text
from trainyard.artifacts.inputs import read_checked
from trainyard.datasets.fine_tuning.conversations import ConversationFile
from trainyard.datasets.fine_tuning.questions import (
    GPT_WORDING,
    Kind,
    PromptFormat,
    Question,
    Wording,
    read_question,
)
from trainyard.datasets.plain_text import PlainText
from trainyard.errors import ConfigError, DataError
from trainyard.evaluation.answers import TokenScores, exact_match, token_scores
from trainyard.evaluation.config import QuestionConfig
from trainyard.inference.static import generate
from trainyard.models.gpt.model import GPTModel
from trainyard.progress import Progress
from trainyard.tokenizers.base import Tokenizer

PROMPTS = {"nq": "nq", "triviaqa": "tqa", "squad": "squad1.1"}
"""Tasks, and the data sets of `fine_tuning.questions` whose prompts they have."""
KEYS = ("name", "answer", "system", "ask", "keys")
RENAMED = ("question", "answers", "ctxs", "sub-paragraphs")
END_OF_TEXT = "<|endoftext|>"


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
    file = ConversationFile(url)
    end = len(file) if config.num_gen < 0 else config.gen_start_idx + config.num_gen
    chosen = range(len(file))[config.gen_start_idx : end]
    if not chosen:
        raise ConfigError(
            f"--gen-start-idx {config.gen_start_idx} and --num-gen {config.num_gen} choose none of "
            f"the {len(file)} questions of {url}"
        )
    return [_question(file, number, task, config) for number in chosen]


def _question(
    file: ConversationFile, number: int, task: QuestionTask, config: QuestionConfig
) -> Question:
    record = file.record(number)
    renamed = {name: record[key] for name, key in task.keys.items() if key in record}
    try:
        return read_question(record | renamed, config.contexts, config.longform_answer)
    except ValueError as fault:
        raise DataError(f"{file.where(number)}: {fault}") from None


def answer_all(
    model: GPTModel,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    task: QuestionTask,
    config: QuestionConfig,
    batch_size: int,
    length: int,
    progress: Progress,
) -> list[str]:
    """The answer to each question on one line, without what comes behind its end.

    length: tokens of a prompt and its answer, at most."""
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
    plain = PlainText(tokenizer)
    room -= len(plain.before)
    answers: list[str] = []
    for first, batch in _batches(questions, batch_size):
        prompts = [
            [*plain.before, *prompt_format.prompt(question, plain, room)[-room:]]
            for question in batch
        ]
        result = generate(
            model,
            prompts,
            config.out_seq_length,
            sampling=config.sampling,
            eod=tokenizer.eod,
            vocab_size=tokenizer.vocab_size,
            first_request=first,
        )
        answers += [_one_line(tokenizer, output) for output in result.outputs]
        progress.update(len(batch))
    return answers


def _batches(questions: Sequence[Question], size: int) -> Iterator[tuple[int, Sequence[Question]]]:
    for first in range(0, len(questions), size):
        yield first, questions[first : first + size]


def _one_line(tokenizer: Tokenizer, output: list[int]) -> str:
    kept = output[:-1] if output and output[-1] == tokenizer.eod else output
    return tokenizer.decode(kept).partition(END_OF_TEXT)[0].strip().replace("\n", " ")


def summary(questions: Sequence[Question], predictions: Sequence[str]) -> dict[str, Any]:
    """Means over the questions, and each with its scores. F1 leaves out empty answers."""
    rows: list[dict[str, Any]] = []
    scored: list[TokenScores] = []
    for question, prediction in zip(questions, predictions, strict=True):
        scores = token_scores(prediction, question.answers[0]) if question.answers else None
        row = {
            "question": question.text,
            "pred": prediction,
            "answers": list(question.answers),
            "exact_match": exact_match(prediction, question.answers),
            "f1": None if scores is None else scores.f1,
        }
        rows.append(row)
        scored += [scores] if scores is not None else []

    def mean(values: Sequence[float]) -> float:
        return sum(values) / max(len(values), 1)

    return {
        "num_questions": len(rows),
        "num_scored": len(scored),
        "exact_match": mean([float(row["exact_match"]) for row in rows]),
        "precision": mean([one.precision for one in scored]),
        "recall": mean([one.recall for one in scored]),
        "f1": mean([one.f1 for one in scored]),
        "predictions": rows,
    }
