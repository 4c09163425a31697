"""Reads the files of a run that have a line for each step or save: its ledger, timings, saves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from stages.report.facts import Save
from stages.report.steps import Step
from trainyard.artifacts.lines import read_listed_lines
from trainyard.artifacts.manifest import Manifest, read_listed
from trainyard.artifacts.urls import join
from trainyard.charts.numbers import is_number
from trainyard.errors import ArtifactError

LEDGER = "ledger.jsonl"
TIMINGS = "timings.jsonl"
SAVES = "saves.jsonl"

T = TypeVar("T")


def step_lines(key: str, manifest: Manifest, name: str) -> Iterator[dict[str, Any]]:
    """The lines of a file with a line for each step; none when the run has no such file."""
    record, url = manifest.record(name), join(key, name)

    def parse(found: dict[str, Any]) -> dict[str, Any]:
        found["step"] = int(found["step"])
        return found

    if record is not None:
        yield from parse_lines(read_listed_lines(url, record), url, "step", parse)


def parse_lines(
    lines: Iterable[bytes], url: str, name: str, parse: Callable[[Any], T]
) -> Iterator[T]:
    """JSON lines, parsed. Raises ArtifactError with the first line that fails."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield parse(json.loads(line))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ArtifactError(f"{url}: line {number} is not a {name}: {error!r}") from error


def saves_of(key: str, manifest: Manifest) -> tuple[Save, ...]:
    """The saves that the run recorded."""
    record, url = manifest.record(SAVES), join(key, SAVES)
    return () if record is None else parse_saves(read_listed(url, record), url)


def parse_saves(data: bytes, url: str) -> tuple[Save, ...]:
    """The lines of saves.jsonl."""
    return tuple(parse_lines(data.splitlines(), url, "save", _save))


def _save(found: dict[str, Any]) -> Save:
    numbers = [found[key] for key in ("step", "bytes", "blocked_seconds", "durable_seconds")]
    if not all(map(is_number, numbers)):
        raise ValueError("not all of its figures are numbers")
    step, size, blocked, durable = numbers
    return Save(int(step), str(found["kind"]), int(size), float(blocked), float(durable))


def step_of_line(line: dict[str, Any], speed: float | None) -> Step:
    """A step from its line in the ledger and its tokens per second."""
    found = line.get("layer_figures")
    figures = found if isinstance(found, dict) else {}
    return Step(
        step=int(line["step"]),
        tokens=_whole(line.get("tokens")),
        loss=_number(line.get("lm_loss")),
        validation_loss=_number(line.get("validation_loss")),
        learning_rate=_number(line.get("learning_rate")),
        grad_norm=_number(line.get("grad_norm")),
        tokens_per_second=speed,
        max_expert_load=_number(figures.get("max expert load")),
        min_expert_load=_number(figures.get("min expert load")),
        dropped_tokens=_number(figures.get("dropped tokens")),
        more_losses=_more_losses(line.get("more_losses")),
    )


def _more_losses(found: Any) -> dict[str, float]:
    losses = found if isinstance(found, dict) else {}
    return {name: float(loss) for name, loss in losses.items() if is_number(loss)}


def expert_shares(line: dict[str, Any], name: str) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """`layer_loads` or `layer_drops` of a line of the ledger; none of another form."""
    loads = line.get(name)
    return tuple(
        (int(layer), tuple(map(float, shares)))
        for layer, shares in (loads.items() if isinstance(loads, dict) else ())
        if layer.isdecimal() and isinstance(shares, list) and shares and all(map(is_number, shares))
    )


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _whole(value: Any) -> int | None:
    return int(value) if is_number(value) else None
