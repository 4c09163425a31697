"""The table of tasks: what each reads, measures, and prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainyard.evaluation.config import EvaluationConfig
from trainyard.evaluation.perplexity import check_text, summary, total_loss
from trainyard.evaluation.wikitext import DETOKENIZERS
from trainyard.models.gpt.model import GPTModel
from trainyard.progress import Progress
from trainyard.tokenizers.base import Tokenizer

ProgressOf = Callable[[int], Progress]
"""Opens the progress of so many targets or examples."""


@dataclass(frozen=True)
class Task:
    """A protocol: from a model and the text of a file to numbers, and the line that reports
    them."""

    run: Callable[[GPTModel, Tokenizer, str, str, EvaluationConfig, ProgressOf], dict[str, Any]]
    line: Callable[[str, dict[str, Any]], str]


def wikitext103(
    model: GPTModel,
    tokenizer: Tokenizer,
    text: str,
    path: str,
    config: EvaluationConfig,
    progress_of: ProgressOf,
) -> dict[str, Any]:
    """Perplexity of a whole file in overlapping windows; see perplexity.py."""
    length = config.window(model.config.seq_length, model.config.positions)
    detokenizer = config.for_file(path).detokenizer
    plain = DETOKENIZERS[detokenizer](text)
    tokens = tokenizer.encode(plain)
    num_words = check_text(text, len(tokens), path)
    with progress_of(len(tokens) - 1) as progress:
        loss_sum = total_loss(
            model,
            tokens,
            length=length,
            stride=config.overlapping_eval,
            batch_size=config.micro_batch_size,
            on_targets=progress.update,
        )
    numbers = summary(loss_sum, len(tokens), num_words, len(plain.encode()))
    return {**numbers, "detokenizer": detokenizer, "seq_length": length}


def perplexity_line(task: str, results: dict[str, Any]) -> str:
    """The line that users of Megatron-LM's tasks grep for."""
    return (
        f" validation results on {task} | avg loss: {results['avg_loss']:.4E} | "
        f"ppl: {results['ppl']:.4E} | adjusted ppl: {results['adjusted_ppl']:.4E} | "
        f"token ratio: {results['token_ratio']} |"
    )


TASKS: dict[str, Task] = {"WIKITEXT103": Task(run=wikitext103, line=perplexity_line)}
