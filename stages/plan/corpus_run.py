"""Plans the preparation of a corpus: a table, or a JSON document."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from stages.plan.corpus_config import RATES, CorpusPlanConfig
from stages.plan.corpus_model import Corpus, Fleet, Forecast, Rates, forecast
from stages.plan.corpus_rates import default_rates, measured_rates
from stages.runtime.context import StageRun
from trainyard.charts.text_table import text_table

FORMAT_VERSION = 1

ADVICE = {
    "CPU": "more machines or cores help",
    "shares": "give as many --shares as processes, or a multiple",
    "files": "cut the corpus into more files, or use --join shares",
    "units": "parts have too few units for the cores; cut compressed files into more, or use fewer "
    "workers",
    "bandwidth of a machine": "more machines help, more cores do not",
    "bandwidth of the store": "only a faster store helps",
    "requests": "larger files and fewer shares need fewer requests",
    "start": "processes start for longer than they work; use fewer",
    "join": "one process joins the parts; --join virtual copies nothing",
}


def run(config: CorpusPlanConfig, stage: StageRun) -> dict[str, Any]:
    """Print the plan; with --output-dir, write corpus_plan.json."""
    rates = rates_of(config)
    found = [forecast(corpus_of(config), fleet, rates) for fleet in fleets(config)]
    written = document(config, rates, found)
    print(json.dumps(written, indent=1) if config.json else report(config, rates, found))
    if stage.output is not None:
        stage.write_json("corpus_plan.json", written)
    return {"seconds": min(one.seconds for one in found)}


def corpus_of(config: CorpusPlanConfig) -> Corpus:
    """The input."""
    return Corpus(
        size_bytes=1e9 * config.corpus_gb,
        num_files=config.corpus_files,
        whole_files=config.compressed,
    )


def fleets(config: CorpusPlanConfig) -> list[Fleet]:
    """One for each number of machines."""
    workers = config.workers or max(config.cores // config.processes, 1)
    return [
        Fleet(
            machines=machines,
            cores=config.cores,
            processes=config.processes,
            workers=workers,
            shares=(config.shares or machines * config.processes)
            if config.join == "shares"
            else None,
        )
        for machines in config.machines
    ]


def rates_of(config: CorpusPlanConfig) -> Rates:
    """The benchmarks', the measured ones in their place, and the given ones in place of both."""
    rates = default_rates(config.join, config.store)
    if config.corpus_measured:
        rates = measured_rates(rates, config.join, config.corpus_measured)
    given = {name: getattr(config, name) for name in RATES if getattr(config, name) is not None}
    if "request_milliseconds" in given:
        given["request_seconds"] = given.pop("request_milliseconds") / 1e3
    if config.join == "virtual":
        given.pop("join_mb_per_second", None)
    return replace(rates, **given)


def document(config: CorpusPlanConfig, rates: Rates, found: Sequence[Forecast]) -> dict[str, Any]:
    """JSON-able; a rate without a limit is null."""
    limits = {name: value if value < math.inf else None for name, value in asdict(rates).items()}
    forecasts = [
        {**asdict(one), "seconds": one.seconds, "bottleneck": one.bottleneck} for one in found
    ]
    return {
        "format_version": FORMAT_VERSION,
        "corpus": asdict(corpus_of(config)),
        "join": config.join,
        "rates": limits,
        "forecasts": forecasts,
    }


def report(config: CorpusPlanConfig, rates: Rates, found: Sequence[Forecast]) -> str:
    """The plan as text."""
    what = "shares" if config.join == "shares" else "files"
    head = ("machines", what, "units", "start", "work", "join", "in all", "bottleneck")
    return "\n".join(
        [
            f"{config.corpus_gb:,g} GB of text in {config.corpus_files:,} "
            f"{'compressed ' if config.compressed else ''}files, {config.cores} cores a machine",
            f"A core tokenizes {rates.tokenize_mb_per_second:,.0f} MB/s, a machine reads and "
            f"writes {rates.machine_mb_per_second:,.0f} MB/s, a process starts for "
            f"{rates.start_seconds:.1f} s",
            "",
            *text_table([head, *map(_row, found)], left=(7,)),
            "",
            *_notes(found),
        ]
    )


def _row(one: Forecast) -> tuple[str, ...]:
    seconds = (one.start_seconds, one.work_seconds, one.join_seconds, one.seconds)
    counts = (one.machines, one.pieces, one.units)
    return (*(f"{count:,}" for count in counts), *map(time_text, seconds), one.bottleneck)


def _notes(found: Sequence[Forecast]) -> list[str]:
    return [f"{name}: {ADVICE[name]}" for name in dict.fromkeys(one.bottleneck for one in found)]


def time_text(seconds: float) -> str:
    """For people."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
