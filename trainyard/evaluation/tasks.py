"""The table of tasks: what each reads, measures, and prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainyard.evaluation.config import EvaluationConfig, QuestionConfig
from trainyard.evaluation.perplexity import check_text, total_loss
from trainyard.evaluation.perplexity import summary as perplexity_summary
from trainyard.evaluation.questions import answer_all, question_task, read_questions, summary
from trainyard.evaluation.text import read_text
from trainyard.evaluation.wikitext import DETOKENIZERS
from trainyard.models.gpt.model import GPTModel
from trainyard.progress import Progress
from trainyard.tokenizers.base import Tokenizer

ProgressOf = Callable[[int], Progress]
"""Opens the progress of so many targets or examples."""

PREDICTIONS = "predictions"
"""Key of results with a row for each example, which are written to a file of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is evaluated, on what."""

    model: GPTModel
    tokenizer: Tokenizer
    path: str
    """URL of the data."""
    config: EvaluationConfig
    questions: QuestionConfig
    progress_of: ProgressOf


@dataclass(frozen=True)
class Task:
    """A protocol: from a model and the data of a file to numbers, and the lines that report
    them."""

    run: Callable[[Subject], dict[str, Any]]
    line: Callable[[str, dict[str, Any]], str]


def wikitext103(subject: Subject) -> dict[str, Any]:
    """Perplexity of a whole file in overlapping windows; see perplexity.py."""
    model, tokenizer, path, config = (
        *(subject.model, subject.tokenizer, subject.path),
        subject.config,
    )
    text = read_text(path)
    length = config.window(model.config.seq_length, model.config.positions)
    detokenizer = config.for_file(path).detokenizer
    plain = DETOKENIZERS[detokenizer](text)
    tokens = tokenizer.encode(plain)
    num_words = check_text(text, len(tokens), path)
    with subject.progress_of(len(tokens) - 1) as progress:
        loss_sum = total_loss(
            model,
            tokens,
            length=length,
            stride=config.overlapping_eval,
            batch_size=config.micro_batch_size,
            on_targets=progress.update,
        )
    numbers = perplexity_summary(loss_sum, len(tokens), num_words, len(plain.encode()))
    return {**numbers, "detokenizer": detokenizer, "seq_length": length}


def perplexity_line(task: str, results: dict[str, Any]) -> str:
    """The line that users of Megatron-LM's tasks grep for."""
    return (
        f" validation results on {task} | avg loss: {results['avg_loss']:.4E} | "
        f"ppl: {results['ppl']:.4E} | adjusted ppl: {results['adjusted_ppl']:.4E} | "
        f"token ratio: {results['token_ratio']} |"
    )


def question_answering(subject: Subject) -> dict[str, Any]:
    """Exact match and F1 of generated answers; see questions.py."""
    config, questions_config = subject.config, subject.questions
    task = question_task(config.task, questions_config.task_description)
    questions = read_questions(subject.path, task, questions_config)
    model = subject.model.config
    with subject.progress_of(len(questions)) as progress:
        predictions = answer_all(
            subject.model,
            subject.tokenizer,
            questions,
            task,
            questions_config,
            config.micro_batch_size,
            min(config.seq_length or model.seq_length, model.positions),
            progress,
        )
    return summary(questions, predictions)


def answers_line(task: str, results: dict[str, Any]) -> str:
    """The lines of Megatron-LM's evaluate.py."""
    return (
        f"Method: {task}; Precision: {results['precision']:.4f}; "
        f"recall: {results['recall']:.4f}; f1: {results['f1']:.4f}\n"
        f"Exact Match: {results['exact_match']:.4f};"
    )


QUESTIONS = Task(run=question_answering, line=answers_line)
TASKS: dict[str, Task] = {
    "WIKITEXT103": Task(run=wikitext103, line=perplexity_line),
    **dict.fromkeys(("nq", "triviaqa", "squad", "QA"), QUESTIONS),
}
