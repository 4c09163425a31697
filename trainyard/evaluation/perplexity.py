"""Perplexity of one long text, in overlapping windows.

Target t is token t, 1 <= t < number of tokens. The first window scores all its targets. Each later
one moves on by `stride` and scores its last `stride` targets only. So every target is scored once,
and behind the first window it has at least window - stride tokens of context."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainyard.errors import DataError
from trainyard.evaluation.config import EvaluationConfig
from trainyard.evaluation.detokenizers import DETOKENIZERS
from trainyard.evaluation.examples import ProtocolId
from trainyard.evaluation.metrics import Metric, Row, Summary
from trainyard.evaluation.scoring import Request, Scorer
from trainyard.evaluation.text import read_text
from trainyard.tokenizers.base import Tokenizer


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens start .. start + num_targets, of which the last `num_scored` targets count."""

    start: int
    num_targets: int
    num_scored: int


def windows(num_tokens: int, length: int, stride: int) -> list[Window]:
    """The windows over a text of `num_tokens`, each of at most `length` targets."""
    num_targets = num_tokens - 1
    result = [Window(0, min(length, num_targets), min(length, num_targets))]
    scored = result[0].num_scored
    while scored < num_targets:
        start = result[-1].start + stride
        end = min(start + length, num_targets)
        result.append(Window(start, end - start, end - scored))
        scored = end
    return result


@dataclass(frozen=True, slots=True)
class TextWindows:
    """A text file in windows; implements `examples.Examples`."""

    scorer: Scorer
    tokens: Sequence[int]
    windows: Sequence[Window]
    protocol: ProtocolId
    text: str
    """After detokenizing."""
    num_words: int
    """Of the file as it is."""
    unit: str = "windows"

    def __len__(self) -> int:
        """Windows."""
        return len(self.windows)

    def score(self, numbers: range) -> list[Row]:
        """`loss` of a window in nats, over its `targets`."""
        chosen = [self.windows[number] for number in numbers]
        requests = [
            Request(self.tokens[w.start : w.start + w.num_targets + 1], w.num_scored)
            for w in chosen
        ]
        scores = self.scorer.score(requests)
        return [
            {"example": number, "loss": score.loss, "targets": window.num_scored}
            for number, window, score in zip(numbers, chosen, scores, strict=True)
        ]

    def summarize(self, rows: Sequence[Row]) -> Summary:
        """Perplexities, and the numbers that they follow from."""
        loss_sum = math.fsum(row["loss"] for row in rows)
        num_bytes = len(self.text.encode())
        return summarize(loss_sum, len(self.tokens), self.num_words, num_bytes)

    def texts(self) -> list[str]:
        """Its lines with text."""
        return [line for line in self.text.split("\n") if line.strip()]

    def line(self, task: str, numbers: Mapping[str, Any]) -> str:
        """The line that users of Megatron-LM's tasks grep for."""
        return (
            f" validation results on {task} | avg loss: {numbers['avg_loss']:.4E} | "
            f"ppl: {numbers['ppl']:.4E} | adjusted ppl: {numbers['adjusted_ppl']:.4E} | "
            f"token ratio: {numbers['token_ratio']} |"
        )


def open_text(
    url: str, config: EvaluationConfig, scorer: Scorer, tokenizer: Tokenizer
) -> TextWindows:
    """The windows of a text file. Raises DataError for a file that is no text or too short."""
    text = read_text(url)
    model = scorer.model.config
    length = config.window(model.seq_length, model.positions)
    plain = DETOKENIZERS[config.detokenizer](text)
    tokens = tokenizer.encode(plain)
    stride = config.overlapping_eval
    protocol = ProtocolId(
        f"{config.task}/{length}/{stride}",
        {
            "version": 1,
            "detokenizer": config.detokenizer,
            "window": length,
            "stride": stride,
            "words": "pieces between single spaces of the stripped file, before detokenizing",
        },
    )
    num_words = check_text(text, len(tokens), url)
    cut = windows(len(tokens), length, stride)
    return TextWindows(scorer, tokens, cut, protocol, plain, num_words)


def summarize(loss_sum: float, num_tokens: int, num_words: int, num_bytes: int) -> Summary:
    """The reported numbers: per token, per word of the file (adjusted), per byte of the text."""
    num_targets = num_tokens - 1
    token_ratio = num_targets / (num_words - 1)
    bits = num_targets / math.log(2.0) / num_bytes
    metrics = {
        "avg_loss": Metric("loss", "targets", "lower", of_tokens=True),
        "ppl": Metric("loss", "targets", "lower", exponential=True, of_tokens=True),
        "adjusted_ppl": Metric("loss", "targets", "lower", token_ratio, exponential=True),
        "bits_per_byte": Metric("loss", "targets", "lower", bits),
    }
    numbers = {name: metric.value(loss_sum, num_targets) for name, metric in metrics.items()}
    counts = {
        "token_ratio": token_ratio,
        "num_tokens": num_tokens,
        "num_original_tokens": num_words,
        "num_bytes": num_bytes,
    }
    return Summary({**numbers, **counts}, metrics)


def check_text(text: str, num_tokens: int, name: str) -> int:
    """Words of a file before detokenising; DataError when there are too few to measure."""
    num_words = len(text.strip().split(" "))
    if num_words < 2 or num_tokens < 2:
        raise DataError(
            f"{name}: {num_words} words and {num_tokens} tokens; perplexity needs 2 of each"
        )
    return num_words
