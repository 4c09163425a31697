"""Multiple choice by likelihood: of the texts that may follow a context, the likeliest is chosen.

`accuracy` compares the log-likelihoods of the choices, `accuracy_norm` those over the bytes of each
choice, as lm-evaluation-harness does with acc and acc_norm. Of equal choices, the first counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainyard.datasets.classification.glue import glue_name, read_pairs
from trainyard.datasets.classification.race import read_race
from trainyard.datasets.fine_tuning.conversations import ConversationFile
from trainyard.errors import DataError
from trainyard.evaluation.config import EvaluationConfig
from trainyard.evaluation.continuations import Continuations
from trainyard.evaluation.examples import ProtocolId
from trainyard.evaluation.metrics import Metric, Row, Summary
from trainyard.evaluation.scoring import Request, Scorer
from trainyard.tokenizers.base import Tokenizer

METRICS = {"accuracy": Metric("is_right"), "accuracy_norm": Metric("is_right_norm")}

MNLI_WORDS = (" False", " True", " Neither")
"""For contradiction, entailment, neutral."""
QQP_WORDS = (" no", " yes")


@dataclass(frozen=True, slots=True)
class Choice:
    """A context, and texts that may follow."""

    context: str
    texts: tuple[str, ...]
    gold: int


def read_choices(url: str) -> tuple[str, list[Choice]]:
    """What the files of a URL are, and their choices: a folder of RACE, a .tsv of MNLI or QQP, or a
    .jsonl file of query, choices and gold. DataError for anything else."""
    if url.endswith((".jsonl", ".json")):
        return "jsonl", _of_lines(ConversationFile(url))
    if not url.endswith(".tsv"):
        return "RACE", [
            Choice(
                f"Article: {one.article}\n\nQuestion: {one.question}\n\nAnswer:",
                tuple(f" {option}" for option in one.options),
                one.answer,
            )
            for one in read_race(url)
        ]
    name = glue_name(url)
    if name is None:
        raise DataError(f"{url}: its headings are neither those of MNLI nor those of QQP")
    pairs = read_pairs(url, name)
    if name == "MNLI":
        asked = "{}\nQuestion: {} True, False or Neither?\nAnswer:"
        return name, [Choice(asked.format(p.first, p.second), MNLI_WORDS, p.label) for p in pairs]
    asked = (
        "Question 1: {}\nQuestion 2: {}\nQuestion: Do both questions ask the same thing?\nAnswer:"
    )
    return name, [Choice(asked.format(p.first, p.second), QQP_WORDS, p.label) for p in pairs]


def _of_lines(file: ConversationFile) -> list[Choice]:
    found = []
    for number in range(len(file)):
        record = file.record(number)
        query, texts, gold = record.get("query"), record.get("choices"), record.get("gold")
        is_list = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
        if not isinstance(query, str) or not is_list or not isinstance(texts, list):
            raise DataError(
                f"{file.where(number)}: not an object with a string 'query' and a list of strings "
                "'choices'"
            )
        if type(gold) is not int or not 0 <= gold < len(texts):
            raise DataError(
                f"{file.where(number)}: 'gold' is not the number of one of its {len(texts)} "
                "choices, from 0"
            )
        found.append(Choice(query, tuple(_spaced(query, text) for text in texts), gold))
    return found


def _spaced(query: str, text: str) -> str:
    """A choice with a space before it, unless it or the query brings one."""
    is_apart = not query or query[-1].isspace() or text[:1].isspace()
    return text if is_apart else f" {text}"


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices of a data set; implements `examples.Examples`."""

    scorer: Scorer
    choices: Sequence[Choice]
    requests: Sequence[Sequence[Request]]
    num_cut: int
    """Contexts that were cut from the left for some choice."""
    protocol: ProtocolId
    unit: str = "questions"

    def __len__(self) -> int:
        """Questions."""
        return len(self.choices)

    def score(self, numbers: range) -> list[Row]:
        """`losses` of the choices in nats, their `probabilities`, and whether the right one is the
        likeliest, by its sum and by its sum over bytes."""
        flat = self.scorer.score([one for n in numbers for one in self.requests[n]])
        rows, at = [], 0
        for number in numbers:
            count = len(self.requests[number])
            losses = [score.loss for score in flat[at : at + count]]
            rows.append(_row(number, self.choices[number], losses))
            at += count
        return rows

    def summarize(self, rows: Sequence[Row]) -> Summary:
        """Both accuracies."""
        figures = {name: metric.document(rows)["value"] for name, metric in METRICS.items()}
        counts = {
            "num_correct": sum(row["is_right"] for row in rows),
            "num_examples": len(rows),
            "num_cut_contexts": self.num_cut,
        }
        return Summary({**figures, **counts}, METRICS)

    def texts(self) -> list[str]:
        """The contexts with the right choice."""
        return [one.context + one.texts[one.gold] for one in self.choices]

    def line(self, task: str, numbers: Mapping[str, Any]) -> str:
        """As that of LAMBADA."""
        return (
            f" validation results on {task} | number correct: {numbers['num_correct']:.4E} | "
            f"total examples: {numbers['num_examples']:.4E} | "
            f"avg accuracy: {numbers['accuracy']:.4E} | "
            f"by bytes: {numbers['accuracy_norm']:.4E}"
        )


def _row(number: int, choice: Choice, losses: Sequence[float]) -> Row:
    least = min(losses)
    weights = [math.exp(least - loss) for loss in losses]
    by_bytes = [
        loss / max(len(text.encode()), 1) for loss, text in zip(losses, choice.texts, strict=True)
    ]
    return {
        "example": number,
        "is_right": int(losses.index(least) == choice.gold),
        "is_right_norm": int(by_bytes.index(min(by_bytes)) == choice.gold),
        "gold": choice.gold,
        "losses": list(losses),
        "probabilities": [weight / sum(weights) for weight in weights],
    }


def open_choices(
    url: str, config: EvaluationConfig, scorer: Scorer, tokenizer: Tokenizer
) -> Choices:
    """The choices of a data set as tokens. DataError names a question that cannot be scored."""
    model = scorer.model.config
    length = config.window(model.seq_length, model.positions)
    layout, choices = read_choices(url)
    continuations = Continuations.of(tokenizer)
    requests, num_cut = [], 0
    for number, choice in enumerate(choices):
        try:
            pairs = [
                continuations.fitted(*continuations.behind(choice.context, text), length)
                for text in choice.texts
            ]
        except ValueError as fault:
            raise DataError(f"{url}: question {number}, from 0: {fault}") from None
        requests.append([request for request, _ in pairs])
        num_cut += any(is_cut for _, is_cut in pairs)
    definition = {"version": 1, "layout": layout, "longest": length}
    protocol = ProtocolId(f"MULTIPLE-CHOICE/{layout}", definition)
    return Choices(scorer, choices, requests, num_cut, protocol)
