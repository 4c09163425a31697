"""The second pass: which documents go and which lines are cut, from all fingerprints.

One process; its memory grows with the duplicates, not with the documents."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stages.dedup.config import DedupConfig
from stages.runtime.context import StageRun
from stages.runtime.document_units import UnitFile
from trainyard.collection.duplicates.clusters import (
    EXACT,
    Corpus,
    Duplicate,
    NearRules,
    exact_duplicates,
    flags,
    near_duplicates,
    repeated_lines,
)
from trainyard.collection.duplicates.fingerprints import Fingerprints
from trainyard.collection.duplicates.minhash import Array
from trainyard.collection.duplicates.spill import Spill

CLUSTERS = "clusters.jsonl"


@dataclass(slots=True)
class Decisions:
    """What becomes of the documents of a unit; numbers count from its first."""

    count: int
    """Documents of the unit."""
    drops: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By document: rule, similarity and the document that stands for it."""
    cuts: dict[int, list[int]] = field(default_factory=dict)
    """By document: the lines to cut."""

    def write(self, path: Path) -> None:
        """For a worker."""
        path.write_text(json.dumps([self.count, self.drops, self.cuts]))

    @staticmethod
    def read(path: Path) -> Decisions:
        """What `write` wrote."""
        count, drops, cuts = json.loads(path.read_text())
        numbers = {int(k): v for k, v in drops.items()}
        return Decisions(count, numbers, {int(k): v for k, v in cuts.items()})


def decide(
    config: DedupConfig, stage: StageRun, files: Sequence[Sequence[UnitFile]], folder: Path
) -> int:
    """Write a file of decisions for each unit to `folder`, and the table of clusters to the output;
    returns the number of clusters. files: the fingerprints of the pieces of each unit, in order."""
    scratch = stage.scratch
    corpus = Corpus(scratch / "corpus")
    size = sum(file.record.size_bytes for own in files for file in own)
    guess = size // 32
    exact = Spill(scratch / "exact", 3, 2, guess // 4)
    near = Spill(scratch / "near", 2, 1, guess)
    lines = Spill(scratch / "lines", 5, 2, guess)
    firsts: list[int] = []
    with stage.progress(size, "bytes", "compare") as progress:
        for unit, file in ((unit, file) for unit, own in enumerate(files) for file in own):
            part = Fingerprints.parse(file.read(), file.url)
            first = corpus.add(part, config.keep)
            if unit == len(firsts):
                firsts.append(first)
            numbers = np.arange(first, first + len(part.texts), dtype=np.uint64)
            if config.exact:
                exact.add(np.column_stack([part.texts, numbers]))
            for keys in part.bands.T:
                near.add(np.column_stack([keys, numbers]))
            if len(part.lines):
                lines.add(_line_rows(part, first))
            progress.update(file.record.size_bytes)
    corpus.close()
    duplicates = _duplicates(config, corpus, exact, near)
    stands = {one.document: one for one in duplicates}
    units = _spread(duplicates, corpus, firsts)
    _add_cuts(lines, stands, firsts, units)
    for number, decided in enumerate(units):
        decided.write(folder / f"{number:05d}.json")
    return _write_clusters(stage, corpus, duplicates)


def _line_rows(part: Fingerprints, first: int) -> Array:
    documents = part.line_documents
    order = part.records[documents, 0]
    own = (documents + first).astype(np.uint64)
    return np.column_stack([part.lines, order, part.line_numbers.astype(np.uint64), own])


def _duplicates(config: DedupConfig, corpus: Corpus, exact: Spill, near: Spill) -> list[Duplicate]:
    """All duplicates, by document; what stands for one is itself none."""
    same = list(exact_duplicates(exact, corpus))
    bucket = config.bucket_threshold
    rules = NearRules(
        measure=config.jaccard,
        threshold=config.jaccard_threshold,
        bucket_threshold=config.jaccard_threshold if bucket is None else bucket,
        heuristic_iter=config.heuristic_iter,
    )
    gone = flags(corpus.count, [one.document for one in same])
    alike = {one.document: one for one in near_duplicates(near, corpus, gone, rules)}
    final = [
        Duplicate(one.document, alike[one.kept].kept, EXACT, alike[one.kept].similarity)
        if one.kept in alike
        else one
        for one in same
    ]
    return sorted([*final, *alike.values()])


def _spread(
    duplicates: Iterable[Duplicate], corpus: Corpus, firsts: Sequence[int]
) -> list[Decisions]:
    ends = [*firsts, corpus.count][1:]
    units = [Decisions(end - first) for first, end in zip(firsts, ends, strict=True)]
    for one in duplicates:
        unit = bisect_right(firsts, one.document) - 1
        units[unit].drops[one.document - firsts[unit]] = {
            "rule": one.rule,
            "similarity": round(one.similarity, 4),
            "kept": corpus.name(one.kept),
        }
    return units


def _add_cuts(
    lines: Spill, stands: dict[int, Duplicate], firsts: Sequence[int], units: list[Decisions]
) -> None:
    for found in repeated_lines(lines, stands):
        for document, line in found:
            unit = bisect_right(firsts, document) - 1
            units[unit].cuts.setdefault(document - firsts[unit], []).append(line)


def _write_clusters(stage: StageRun, corpus: Corpus, duplicates: Sequence[Duplicate]) -> int:
    clusters: dict[int, list[Duplicate]] = {}
    for one in duplicates:
        clusters.setdefault(one.kept, []).append(one)
    with stage.open(CLUSTERS) as out:
        for kept, others in sorted(clusters.items()):
            table = [
                {**corpus.name(one.document), "rule": one.rule, "similarity": one.similarity}
                for one in others
            ]
            out.write(json.dumps({"kept": corpus.name(kept), "others": table}).encode() + b"\n")
    return len(clusters)
