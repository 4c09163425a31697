"""The first pass: the scores of the documents of a unit, in a worker."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from stages.runtime.document_units import UnitDone, UnitJob, reader_of
from stages.score.config import ANNOTATED, NGRAMS, ScoreConfig
from trainyard.artifacts import store
from trainyard.classifiers.ngrams import NgramClassifier
from trainyard.classifiers.toxicity import (
    NO_PROMPT,
    NO_SCORE,
    PROMPT,
    Prompts,
    Scores,
    key_of,
)
from trainyard.classifiers.user import UserClassifier
from trainyard.collection.documents import Item
from trainyard.errors import ArtifactError, DataError

SCORE = "score"
"""Key of the object with a document's scores, by the name of the attribute."""
WEIGHTS = "weights.npy"
"""Of the trained classifier, in the scratch folder that all workers read."""
TEXTS_AT_ONCE = 256
"""Texts of a call of a classifier."""

Scorer = Callable[[Sequence[str]], Any]


@dataclass(frozen=True, slots=True)
class UnitScores:
    """What the first pass finds out about the documents of a unit, in order: 24 bytes of each."""

    scores: Scores
    prompts: Prompts

    def pack(self) -> bytes:
        """As a file."""
        file = io.BytesIO()
        np.savez(file, scores=self.scores, prompts=self.prompts)
        return file.getvalue()

    @staticmethod
    def parse(data: bytes, url: str) -> UnitScores:
        """From a file; ArtifactError for another one."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                found = UnitScores(arrays["scores"], arrays["prompts"])
        except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise ArtifactError(f"{url}: not the scores of a unit ({error})") from error
        scores, prompts = found.scores, found.prompts
        is_array = scores.dtype == np.float64 and prompts.dtype == PROMPT and scores.ndim == 1
        if not is_array or scores.shape != prompts.shape or ((scores < 0) | (scores > 1)).any():
            raise ArtifactError(f"{url}: not the scores of a unit; make it again")
        return found


def name_of(job: UnitJob) -> str:
    """The file of a unit's scores."""
    return f"scores-{job.label}.npz"


def score_unit(job: UnitJob) -> UnitDone:
    """Write the scores of a unit."""
    config: ScoreConfig = job.config
    reader = reader_of(job)
    scores: list[float] = []
    prompts: list[bytes] = []
    texts: list[tuple[int, str]] = []

    def flush() -> None:
        found = scorer_of(config.classifier, job.scratch)([text for _, text in texts])
        for (place, _), value in zip(texts, found, strict=True):
            scores[place] = float(value)
        texts.clear()

    for item in reader.items():
        text, prompt = item.fields[config.documents.json_key], item.fields.get(config.prompt_key)
        prompts.append(key_of(prompt) if isinstance(prompt, str) and prompt else NO_PROMPT)
        known = attributes_of(item)
        scores.append(NO_SCORE)
        if not text.strip():
            continue
        if config.classifier == ANNOTATED:
            scores[-1] = annotated(known, config.attribute, _where(item))
        else:
            texts.append((len(scores) - 1, text))
        if len(texts) == TEXTS_AT_ONCE:
            flush()
    if texts:
        flush()
    name, packed = name_of(job), UnitScores(np.array(scores), np.array(prompts, PROMPT)).pack()
    record = store.write_bytes(store.join(job.folder, name), packed, name)
    return UnitDone((record,), {}, reader.digests)


@lru_cache(maxsize=1)
def scorer_of(classifier: str, scratch: str) -> Scorer:
    """The classifier, loaded once in a worker."""
    if classifier == NGRAMS:
        return NgramClassifier(np.load(Path(scratch, WEIGHTS), allow_pickle=False)).score
    return UserClassifier.load(classifier).score


def attributes_of(item: Item) -> dict[str, Any] | None:
    """The scores that a document has already, by name; None if it has null in their place.
    DataError for another value, which would be lost."""
    found = item.fields.get(SCORE)
    if found is not None and not isinstance(found, dict):
        raise DataError(
            f"{_where(item)}: has {found!r:.40} in {SCORE!r}, where this stage writes an object of "
            "scores; rename that key in the input"
        )
    return found if found is not None or SCORE in item.fields else {}


def annotated(known: dict[str, Any] | None, attribute: str, where: str) -> float:
    """The score that a document has already; NaN if it has null instead, as in the files of
    Megatron-LM's scripts. DataError for a document without one.

    known: what `attributes_of` says. where: for the message."""
    if known is None or (attribute in known and known[attribute] is None):
        return NO_SCORE
    value = known.get(attribute)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise DataError(
            f"{where}: --classifier {ANNOTATED} reads a number from 0 to 1 in {SCORE!r}, "
            f"{attribute!r}, and this document has none; score it, or give another --classifier"
        )
    return float(value)


def _where(item: Item) -> str:
    return f"{item.place.file}, byte {item.place.offset}"
