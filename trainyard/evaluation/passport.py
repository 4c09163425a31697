"""The passport of a score: all that another score must share to be compared with it.

`results.json` of an evaluation, version 2:

    {"format_version": 2, "task": "LAMBADA", "step": 2000,
     "sets": [{"name": "lambada_test.jsonl", "rows": "predictions.jsonl",
               "accuracy": 0.4, ...                         the numbers of the task
               "passport": {
                   "protocol": {"name", "digest", "definition"},
                   "data": {"digest", "examples"},
                   "checkpoint": {"digest", "step"},
                   "tokenizer": {"digest", "type", "vocab_size"},
                   "code": {"version", "digest"},
                   "figures": {"accuracy": {"value", "stderr", "count", ...}}}}]}

`rows` is a file beside it with the scores of every example, a JSON object a line (`metrics.Row`).
No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainyard import json_text
from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_bytes, digest_document
from trainyard.artifacts.inputs import read_checked
from trainyard.artifacts.urls import basename, check_relative, join
from trainyard.errors import ArtifactError
from trainyard.evaluation.metrics import Metric, Row
from trainyard.tokenizers.base import Tokenizer

FORMAT_VERSION = 2
RESULTS = "results.json"


def set_names(urls: Sequence[str]) -> list[str]:
    """A name for each data set: that of its file, with its folder or its place where two are
    alike."""
    for depth in (1, 2):
        names = ["/".join(url.rstrip("/").split("/")[-depth:]) for url in urls]
        if len(set(names)) == len(names):
            return names
    return [f"{basename(url.rstrip('/'))}#{place}" for place, url in enumerate(urls)]


def rows_name(place: int) -> str:
    """The file with the examples of a data set, by its place among those of the evaluation."""
    return f"predictions.{place}.jsonl" if place else "predictions.jsonl"


# --- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScoredSet:
    """The results of one data set, as another program finds them."""

    folder: str
    name: str
    passport: Mapping[str, Any]
    metrics: Mapping[str, Metric]
    rows_url: str

    def rows(self) -> list[Row]:
        """The scores of its examples. ArtifactError for a file that an evaluation did not write."""
        rows = []
        for number, line in enumerate(read_checked(self.rows_url).splitlines(), start=1):
            try:
                row = json_text.loads(line)
            except ValueError as error:
                raise ArtifactError(f"{self.rows_url}: line {number}: {error}") from None
            if not isinstance(row, dict) or type(row.get("example")) is not int:
                raise ArtifactError(f"{self.rows_url}: line {number} is no row of an evaluation")
            rows.append(row)
        return rows


def read_results(folder: str) -> list[ScoredSet]:
    """The data sets of an evaluation's folder. Raises ArtifactError for another folder, and for
    results from before there were passports."""
    url = join(folder, RESULTS)
    if not store.exists(url):
        raise ArtifactError(
            f"{folder} has no {RESULTS}; name a folder that stages.evaluate wrote with --output-dir"
        )
    try:
        document = json_text.loads(read_checked(url))
    except ValueError as error:
        raise ArtifactError(f"{url}: {error}") from None
    if not isinstance(document, dict) or document.get("format_version") != FORMAT_VERSION:
        raise ArtifactError(
            f"{url}: no results with passports (format_version {FORMAT_VERSION}); run "
            "stages.evaluate again with --output-dir"
        )
    sets = document.get("sets")
    if not isinstance(sets, list) or not sets:
        raise ArtifactError(f"{url}: names no data set under 'sets'")
    return [_read_set(folder, url, one) for one in sets]


def _read_set(folder: str, url: str, document: Any) -> ScoredSet:
    passport = document.get("passport") if isinstance(document, dict) else None
    if not isinstance(passport, dict):
        raise ArtifactError(f"{url}: a data set without a passport")
    for part in ("protocol", "data", "checkpoint", "tokenizer"):
        found = passport.get(part)
        if not isinstance(found, dict) or not isinstance(found.get("digest"), str):
            raise ArtifactError(f"{url}: the passport has no digest of its {part}")
    figures = passport.get("figures")
    if not isinstance(figures, dict) or not all(isinstance(f, dict) for f in figures.values()):
        raise ArtifactError(f"{url}: the passport has no figures")
    name, rows = document.get("name"), document.get("rows")
    if not isinstance(name, str) or not isinstance(rows, str):
        raise ArtifactError(f"{url}: a data set without a name and a file of rows")
    metrics = {key: Metric.read(figure, url) for key, figure in figures.items()}
    return ScoredSet(folder, name, passport, metrics, join(folder, check_relative(rows)))


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Digest of all files that rebuild a tokenizer."""
    files = {name: digest_bytes(data) for name, data in sorted(tokenizer.files().items())}
    return digest_document(files)
