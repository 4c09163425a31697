"""Read what the stages reported and what the documents have, and write the page."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from stages.datasheet.config import DatasheetConfig
from stages.datasheet.look import Found, LookJob, look_unit
from stages.runtime.context import StageRun
from stages.runtime.document_units import run_units
from trainyard.artifacts import store
from trainyard.artifacts.manifest import read_manifest
from trainyard.artifacts.output import Output
from trainyard.artifacts.urls import join
from trainyard.collection.datasheet import page
from trainyard.collection.documents import short_names
from trainyard.collection.tally import Tally
from trainyard.corpus.documents import check_inputs
from trainyard.corpus.units import look_at, plan_units
from trainyard.errors import ArtifactError

log = logging.getLogger(__name__)

PAGE, DATA = ".html", ".json"
REPORT, CLUSTERS = "report.json", "clusters.jsonl"
SHOWN = 15
"""Hosts, sources and licences on the page."""
FETCH, MIX = "fetch", "mix"


@dataclass(slots=True)
class Step:
    """A stage, over all folders that it made."""

    stage: str
    tally: Tally
    tasks: dict[str, dict[str, int]]
    """By evaluation set, of decontaminate."""
    clusters: Counter[int]
    """Clusters of duplicates by their size, of dedup."""
    mixture: dict[str, Any]
    """By source, of mix."""


def run(config: DatasheetConfig, stage: StageRun) -> dict[str, Any]:
    """Write the page and its data."""
    steps = [_read(folder, config.num_samples) for folder in config.folders]
    found = _look(config, stage)
    document = {
        "title": config.title,
        "documents": found.documents,
        "chars": found.chars,
        "words": found.words,
        "licenses": list(config.licenses),
        "languages": _most(found.languages),
        "hosts": _most(found.hosts),
        "num_hosts": len(found.hosts),
        "sources": _most(found.sources),
        "document_licenses": _most(found.licenses),
        "lengths": sorted([int(bits), count] for bits, count in found.lengths.items()),
        "steps": [_document(step) for step in _joined(steps, config.num_samples)],
    }
    stage.write_json(DATA, document)
    stage.write_text(PAGE, page(document))
    assert stage.output is not None
    print(stage.output.file_url(PAGE))
    return {"documents": found.documents, "chars": found.chars, "words": found.words}


def _look(config: DatasheetConfig, stage: StageRun) -> Found:
    files = check_inputs(config.documents, stage.inputs["input"].files, (config.json_key,))
    names = short_names(files)
    units = plan_units(look_at(files))
    total = max(sum(unit.size_bytes for unit in units), 1)
    jobs = [
        LookJob(
            number,
            unit,
            {source.url: names[source.url] for source in unit.sources},
            "",
            config,
            str(stage.scratch),
            -(-config.num_identified * unit.size_bytes // total),
        )
        for number, unit in enumerate(units)
    ]
    whole = Found()
    for facts in run_units(stage, jobs, look_unit, config.workers, "look"):
        whole.add(facts)
    return whole


def _read(folder: str, num_samples: int) -> Step:
    """What a stage says of its output."""
    found = read_manifest(Output.directory(folder).manifest_url)
    if found is None:
        raise ArtifactError(f"{folder}: no manifest.json, so no stage finished it; run that first")
    name, report = found[0].stage, store.read_json(join(folder, REPORT))
    if found[0].config.get("source") == FETCH:  # collect, whose documents are URLs
        name = FETCH
    try:
        if name == MIX:
            kept = sum(one["documents"] for one in report["sources"].values())
            return Step(name, Tally(documents=kept, kept=kept), {}, Counter(), report["sources"])
        tasks = report.pop("tasks", {})
        tally = {key: report[key] for key in asdict(Tally()) if key in report}
        step = Step(name, Tally.parse(tally), tasks, Counter(), {})
    except (AttributeError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{join(folder, REPORT)}: not the report of a stage from documents to documents "
            f"({error!r}); name outputs of collect, clean, dedup, decontaminate and mix"
        ) from error
    if store.exists(join(folder, CLUSTERS)):
        step.clusters = _cluster_sizes(join(folder, CLUSTERS))
    for reason in step.tally.reasons.values():
        del reason.samples[num_samples:]
    return step


def _cluster_sizes(url: str) -> Counter[int]:
    sizes: Counter[int] = Counter()
    with store.open_input(url) as file:
        for line in file:
            sizes[1 + len(orjson.loads(line)["others"])] += 1
    return sizes


def _joined(steps: list[Step], num_samples: int) -> list[Step]:
    """A step for each stage, in the order in which they first ran."""
    joined: dict[str, Step] = {}
    for step in steps:
        one = joined.setdefault(step.stage, Step(step.stage, Tally(), {}, Counter(), {}))
        one.tally.add(step.tally, num_samples)
        one.clusters.update(step.clusters)
        one.tasks |= step.tasks
        one.mixture |= step.mixture
    return list(joined.values())


def _document(step: Step) -> dict[str, Any]:
    return {
        "stage": step.stage,
        **step.tally.document(),
        "tasks": step.tasks,
        "clusters": sorted([size, count] for size, count in step.clusters.items()),
        "mixture": step.mixture,
    }


def _most(counts: Counter[str]) -> list[list[Any]]:
    """[name, count] of the most frequent; ties by name."""
    return [list(one) for one in sorted(counts.items(), key=lambda c: (-c[1], c[0]))[:SHOWN]]
