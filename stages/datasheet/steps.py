"""What the stages before reported of their outputs, checked: others may have written a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trainyard import json_text
from trainyard.artifacts.lines import read_listed_lines
from trainyard.artifacts.manifest import read_listed_json, read_manifest
from trainyard.artifacts.output import Output
from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.urls import join
from trainyard.charts.numbers import is_number
from trainyard.collection.tally import Tally
from trainyard.errors import ArtifactError

REPORT, CLUSTERS = "report.json", "clusters.jsonl"
FETCH, MIX = "fetch", "mix"
OF_TASK = ("ngrams", "occurrences", "documents")
OF_SOURCE = ("documents", "size", "share", "epochs", "mixed_size", "mixed_share")


@dataclass(slots=True)
class Step:
    """A stage, over all folders that it made."""

    stage: str
    tally: Tally = field(default_factory=Tally)
    tasks: dict[str, dict[str, int]] = field(default_factory=dict)
    """By evaluation set, of decontaminate."""
    clusters: Counter[int] = field(default_factory=Counter)
    """Clusters of duplicates by their size, of dedup."""
    mixture: dict[str, Any] = field(default_factory=dict)
    """By source, of mix."""

    def document(self) -> dict[str, Any]:
        """As JSON, for the page."""
        return {
            "stage": self.stage,
            **self.tally.document(),
            "tasks": self.tasks,
            "clusters": sorted([size, count] for size, count in self.clusters.items()),
            "mixture": self.mixture,
        }


def read_step(folder: str, num_samples: int) -> Step:
    """What a stage says of its output. ArtifactError for a folder without, or with another
    document."""
    found = read_manifest(Output.directory(folder).manifest_url)
    if found is None:
        raise ArtifactError(f"{folder}: no manifest.json, so no stage finished it; run that first")
    manifest = found[0]
    name = manifest.stage
    report = read_listed_json(join(folder, REPORT), manifest.record(REPORT))
    clusters = manifest.record(CLUSTERS)
    if manifest.config.get("source") == FETCH:  # collect, whose documents are URLs
        name = FETCH
    try:
        if name == MIX:
            sources = _numbers(report["sources"], OF_SOURCE)
            kept = sum(int(one["documents"]) for one in sources.values())
            return Step(MIX, Tally(documents=kept, kept=kept), mixture=sources)
        tally = Tally.parse({key: report[key] for key in asdict(Tally()) if key in report})
        tasks = _numbers(report.get("tasks", {}), OF_TASK)
        step = Step(name, tally, tasks)
        if clusters is not None:
            step.clusters = _cluster_sizes(join(folder, CLUSTERS), clusters)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{folder}: not the report of a stage from documents to documents "
            f"({repr(error)[:80]}); name outputs of collect, clean, dedup, decontaminate and mix"
        ) from error
    for reason in step.tally.reasons.values():
        del reason.samples[num_samples:]
    return step


def joined(steps: list[Step], num_samples: int) -> list[Step]:
    """A step for each stage, in the order in which they first ran."""
    found: dict[str, Step] = {}
    for step in steps:
        one = found.setdefault(step.stage, Step(step.stage))
        one.tally.add(step.tally, num_samples)
        one.clusters.update(step.clusters)
        one.tasks |= step.tasks
        one.mixture |= step.mixture
    return list(found.values())


def _cluster_sizes(url: str, record: FileRecord) -> Counter[int]:
    sizes: Counter[int] = Counter()
    for line in read_listed_lines(url, record):
        others = json_text.loads(line)["others"]
        if not isinstance(others, list):
            raise TypeError("the others of a cluster are no list")
        sizes[1 + len(others)] += 1
    return sizes


def _numbers(table: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """A table of tables, each with these numbers."""
    for one in table.values():
        if not all(is_number(one[name]) and one[name] >= 0 for name in names):
            raise TypeError(f"one of {', '.join(names)} is no number")
    return dict(table)
