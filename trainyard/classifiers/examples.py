"""Labelled texts in a JSONL file, and the classifier that is trained on them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard import json_text
from trainyard.artifacts.inputs import read_checked
from trainyard.classifiers.ngrams import NgramClassifier, area_under_roc, train
from trainyard.errors import DataError

TEXT, LABEL = "text", "label"
ONE_IN = 10
"""About one text in this many is held out, to measure the classifier: which ones follows from the
texts, so that a text that is there twice is on one side."""
TOXIC = 0.5
"""A label or score from here on counts as positive."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Texts and their labels, numbers from 0 to 1."""

    texts: list[str]
    labels: list[float]


def read_examples(url: str) -> Examples:
    """The lines of a file, objects with a text and a label. DataError names a line that is none,
    and a file that leaves one kind of label alone to train on."""
    try:
        lines = read_checked(url).decode().split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{url}: not UTF-8: {error}") from None
    found = [_example(line, f"{url}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    toxic = [label >= TOXIC for text, label in found if not is_held_out(text)]
    if not any(toxic) or all(toxic):
        raise DataError(
            f"{url}: needs more examples: of the {len(toxic)} to train on, {sum(toxic)} have a "
            f"{LABEL!r} of {TOXIC} or more, and both kinds are needed; "
            f"{len(found) - len(toxic)} are held out to measure the classifier"
        )
    return Examples([text for text, _ in found], [label for _, label in found])


def is_held_out(text: str) -> bool:
    """Whether an example measures the classifier and does not train it."""
    return zlib.crc32(text.encode(errors="surrogatepass")) % ONE_IN == 0


def _example(line: str, where: str) -> tuple[str, float]:
    try:
        document: Any = json_text.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None
    text = document.get(TEXT) if isinstance(document, dict) else None
    label = document.get(LABEL) if isinstance(document, dict) else None
    is_number = isinstance(label, (int, float)) and not isinstance(label, bool)
    if not isinstance(text, str) or label is None or not (is_number and 0 <= label <= 1):
        raise DataError(
            f"{where}: is no object with a text in {TEXT!r} and a number from 0 to 1 in {LABEL!r}"
        )
    return text, float(label)


def train_classifier(
    examples: Examples, report: Callable[[int], object] | None = None
) -> tuple[NgramClassifier, dict[str, Any]]:
    """The classifier of nine tenths of the examples, and how it does on the others. report: as of
    `train`."""
    held = [i for i, text in enumerate(examples.texts) if is_held_out(text)]
    kept = [i for i, text in enumerate(examples.texts) if not is_held_out(text)]
    texts, targets = [examples.texts[i] for i in kept], [examples.labels[i] for i in kept]
    classifier = train(texts, targets, report)
    scores = classifier.score([examples.texts[i] for i in held])
    labels = np.array([examples.labels[i] for i in held])
    return classifier, {"trained_on": len(kept), **_measured(scores, labels)}


def _measured(scores: NDArray[np.float64], labels: NDArray[np.float64]) -> dict[str, Any]:
    if not len(scores):
        return {"held_out": 0, "accuracy": None, "area_under_roc": None}
    is_positive = labels >= TOXIC
    return {
        "held_out": len(scores),
        "accuracy": float(((scores >= TOXIC) == is_positive).mean()),
        "area_under_roc": area_under_roc(scores, is_positive),
    }
