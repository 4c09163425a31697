"""LAMBADA: the last word of a passage (arXiv:1606.06031), by one of three published protocols.

megatron: context and label are the tokens of the passage but the last, and the last one.
megatron-strict: the label is the tokens of " " and the last word; the context those of the text
before it, stripped, so the two are tokenized apart.
lm-eval: the passage is cut at its last space and tokenized as a whole; the label is the tokens
behind those of the part before (lm-evaluation-harness, lambada_openai).

A passage is right if every token of its label is the likeliest one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainyard.datasets.fine_tuning.conversations import ConversationFile
from trainyard.errors import DataError
from trainyard.evaluation.config import EvaluationConfig, LambadaProtocol
from trainyard.evaluation.continuations import Continuations
from trainyard.evaluation.examples import ProtocolId
from trainyard.evaluation.metrics import Metric, Row, Summary
from trainyard.evaluation.scoring import Request, Scorer, is_greedy
from trainyard.tokenizers.base import Tokenizer

METRICS = {
    "accuracy": Metric("is_right"),
    "target_ppl": Metric("loss", better="lower", exponential=True),
}


def split_passage(
    text: str, protocol: LambadaProtocol, continuations: Continuations
) -> tuple[list[int], list[int]]:
    """The tokens of the context and of the label. Raises ValueError for a text without words."""
    words = text.split()
    if not words:
        raise ValueError("the passage has no words")
    if protocol == "megatron":
        tokens = continuations.whole(text)
        return tokens[:-1], tokens[-1:]
    if protocol == "megatron-strict":
        before = text[: text.rfind(words[-1])].strip()
        return continuations.whole(before), continuations.plain.encode(" " + words[-1])
    context, _, word = text.rpartition(" ")
    return continuations.behind(context, " " + word)


@dataclass(frozen=True, slots=True)
class Passages:
    """The passages of a file; implements `examples.Examples`."""

    scorer: Scorer
    passages: Sequence[str]
    requests: Sequence[Request]
    num_cut: int
    """Contexts that were cut from the left."""
    protocol: ProtocolId
    unit: str = "passages"

    def __len__(self) -> int:
        """Passages."""
        return len(self.requests)

    def score(self, numbers: range) -> list[Row]:
        """Whether a label `is_right`, its `loss` in nats, its tokens and the likeliest ones."""
        chosen = [self.requests[number] for number in numbers]
        scores = self.scorer.score(chosen)
        return [
            {
                "example": number,
                "is_right": int(is_greedy(request, score)),
                "loss": score.loss,
                "label": list(request.tokens[-request.num_scored :]),
                "predicted": list(score.predicted),
            }
            for number, request, score in zip(numbers, chosen, scores, strict=True)
        ]

    def summarize(self, rows: Sequence[Row]) -> Summary:
        """Accuracy, and the perplexity of a label."""
        figures = {name: metric.document(rows)["value"] for name, metric in METRICS.items()}
        counts = {
            "num_correct": sum(row["is_right"] for row in rows),
            "num_examples": len(rows),
            "num_cut_contexts": self.num_cut,
        }
        return Summary({**figures, **counts}, METRICS)

    def texts(self) -> list[str]:
        """The passages."""
        return list(self.passages)

    def line(self, task: str, numbers: Mapping[str, Any]) -> str:
        """The line of Megatron-LM's tasks."""
        return (
            f" validation results on {task} | number correct: {numbers['num_correct']:.4E} | "
            f"total examples: {numbers['num_examples']:.4E} | "
            f"avg accuracy: {numbers['accuracy']:.4E}"
        )


def open_passages(
    url: str, config: EvaluationConfig, scorer: Scorer, tokenizer: Tokenizer
) -> Passages:
    """The passages of a .jsonl file, a text under `text` on each line. DataError names a line that
    has none."""
    model = scorer.model.config
    length = config.window(model.seq_length, model.positions)
    file = ConversationFile(url)
    continuations = Continuations.of(tokenizer)
    passages, requests, num_cut = [], [], 0
    for number in range(len(file)):
        text = file.record(number).get("text")
        if not isinstance(text, str):
            raise DataError(
                f"{file.where(number)}: no string under 'text', as LAMBADA's lines have"
            )
        try:
            context, label = split_passage(text, config.lambada, continuations)
            request, is_cut = continuations.fitted(context, label, length)
        except ValueError as fault:
            raise DataError(f"{file.where(number)}: {fault}") from None
        passages.append(text)
        requests.append(request)
        num_cut += is_cut
    definition = {"version": 1, "protocol": config.lambada, "longest": length}
    protocol = ProtocolId(f"LAMBADA/{config.lambada}", definition)
    return Passages(scorer, passages, requests, num_cut, protocol)
