"""Read the reports of the stages and the documents, and write the page."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from stages.datasheet.config import DatasheetConfig
from stages.datasheet.look import Found, LookJob, look_unit
from stages.datasheet.steps import joined, read_step
from stages.runtime.context import StageRun
from stages.runtime.document_units import run_units
from trainyard.artifacts.inputs import check_all_listed
from trainyard.collection.datasheet import page
from trainyard.collection.documents import short_names
from trainyard.corpus.documents import check_inputs
from trainyard.corpus.units import look_at, plan_units

log = logging.getLogger(__name__)

PAGE, DATA = ".html", ".json"
SHOWN = 15
"""Hosts, sources and licences on the page."""


def run(config: DatasheetConfig, stage: StageRun) -> dict[str, Any]:
    """Write the page and its data."""
    steps = [read_step(folder, config.num_samples) for folder in config.folders]
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
        "steps": [step.document() for step in joined(steps, config.num_samples)],
    }
    stage.write_json(DATA, document)
    stage.write_text(PAGE, page(document))
    assert stage.output is not None
    print(stage.output.file_url(PAGE))
    return {"documents": found.documents, "chars": found.chars, "words": found.words}


def _look(config: DatasheetConfig, stage: StageRun) -> Found:
    given = stage.inputs["input"].files
    files = check_inputs(config.documents, given, (config.json_key,), "--documents")
    check_all_listed(files)
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
            quota=-(-config.num_identified * unit.size_bytes // total),
        )
        for number, unit in enumerate(units)
    ]
    whole = Found()
    for facts in run_units(stage, jobs, look_unit, config.workers, "look"):
        whole.add(facts)
    return whole


def _most(counts: Counter[str]) -> list[list[Any]]:
    """[name, count] of the most frequent; ties by name."""
    return [list(one) for one in sorted(counts.items(), key=lambda c: (-c[1], c[0]))[:SHOWN]]
