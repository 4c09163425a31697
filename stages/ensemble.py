"""Scores several classifiers as one, by the mean of the probabilities that they saved.

    python -m stages.ensemble A B ... [--output-dir OUT]

A, B, ... are folders of stages.evaluate, or of stages.classify, by one protocol on the same data.
OUT gets results.json and predictions.jsonl, which stages.compare reads."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from stages.runtime.failure import report_failure
from trainyard import logging as our_logging
from trainyard.arguments import Parser
from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_document
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.urls import canonical, canonical_each, join
from trainyard.errors import ConfigError, TrainyardError
from trainyard.evaluation.ensemble import ensemble
from trainyard.evaluation.metrics import Row, Summary
from trainyard.evaluation.passport import (
    FORMAT_VERSION,
    RESULTS,
    ScoredSet,
    read_results,
    rows_name,
)
from trainyard.logging import one_line
from trainyard.version import VERSION


def main(words: Sequence[str]) -> int:
    """Print the accuracy of each data set. Returns the exit status."""
    parser = Parser(prog="python -m stages.ensemble", description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="+", help="folders of evaluations")
    parser.add_argument("--output-dir", help="folder or URL for the results of the ensemble")
    options = parser.parse_args(list(words))
    our_logging.configure()
    try:
        run(options.folders, options.output_dir)
    except TrainyardError as error:
        return report_failure("ensemble", error, debug=False)
    return 0


def run(folders: Sequence[str], output_dir: str | None) -> None:
    """Score, print, and write the results."""
    if output_dir is not None:
        _check_output(output_dir, folders)
    members = [read_results(folder) for folder in folders]
    if len({len(sets) for sets in members}) > 1:
        raise ConfigError(
            "the folders have different numbers of data sets; evaluate all of them on the same ones"
        )
    documents = []
    for place, sets in enumerate(zip(*members, strict=True)):
        rows, summary = ensemble(sets)
        correct, total = summary.numbers["num_correct"], summary.numbers["num_examples"]
        share = 100.0 * summary.numbers["accuracy"]
        name = one_line(sets[0].name)
        print(f" >> {name}: correct / total = {correct} / {total} = {share:.4f} %")
        documents.append(_document(place, sets, rows, summary))
        if output_dir is not None:
            text = "".join(json.dumps(row) + "\n" for row in rows)
            store.write_bytes(join(output_dir, rows_name(place)), text.encode())
    if output_dir is not None:
        head = {"format_version": FORMAT_VERSION, "task": "ENSEMBLE", "step": 0}
        text = json.dumps({**head, "sets": documents}, indent=1) + "\n"
        store.write_bytes(join(output_dir, RESULTS), text.encode())


def _check_output(output_dir: str, folders: Sequence[str]) -> None:
    """Refuse a folder whose files are those of a member or of another stage's artifact."""
    if canonical(output_dir) in canonical_each(folders):
        raise ConfigError(f"--output-dir {output_dir} is a member of the ensemble; name another")
    if store.exists(join(output_dir, MANIFEST)):
        raise ConfigError(
            f"--output-dir {output_dir} holds an artifact of a stage, whose files would be "
            "replaced; name another folder"
        )


def _document(
    place: int, members: Sequence[ScoredSet], rows: list[Row], summary: Summary
) -> dict[str, Any]:
    first = members[0].passport
    digests = [member.passport["checkpoint"]["digest"] for member in members]
    passport = {
        "protocol": first["protocol"],
        "data": first["data"],
        "checkpoint": {"digest": digest_document(digests), "members": digests},
        "tokenizer": first["tokenizer"],
        "code": {"version": VERSION},
        "figures": summary.documents(rows),
    }
    document = {"name": members[0].name, "rows": rows_name(place), **summary.numbers}
    return {**document, "passport": passport}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
