"""On how many data-parallel ranks the steps of a run were taken.

A run may go on with another number of ranks, and its ledger is the same for it; but which rank, row
and micro-batch a sample went to (and, for --dataloader-type cyclic, which samples a step had)
depends on it. So each step tells it in the `run` of its manifest, which is part of no digest:

    "run": {"spans": [{"first_step": 1, "last_step": 50, "data_parallel_size": 2,
                       "micro_batch_size": 4}, ...]}"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from trainyard.artifacts.manifest import read_manifest
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.urls import join
from trainyard.checkpoint.steps import step_folder
from trainyard.errors import ArtifactError

KEY = "spans"


class DpSpan(NamedTuple):
    """Steps, both ends included, that were taken alike."""

    first_step: int
    last_step: int
    data_parallel_size: int
    micro_batch_size: int


def with_steps(spans: Sequence[DpSpan], new: DpSpan) -> tuple[DpSpan, ...]:
    """The spans with newer steps behind them; no steps change nothing."""
    if new.last_step < new.first_step:
        return tuple(spans)
    last = spans[-1] if spans else None
    if last is not None and last[2:] == new[2:] and last.last_step + 1 == new.first_step:
        return (*spans[:-1], last._replace(last_step=new.last_step))
    return (*spans, new)


def spans_document(spans: Sequence[DpSpan]) -> dict[str, Any]:
    """What the manifest of a step says."""
    return {KEY: [span._asdict() for span in spans]}


def spans_of_step(root_url: str, step: int) -> tuple[DpSpan, ...]:
    """On how many ranks the steps up to this one were taken, as far as it is known."""
    found = read_manifest(join(root_url, step_folder(step), MANIFEST))
    return parse_spans(found[0].run) if found is not None else ()


def parse_spans(run: Mapping[str, Any]) -> tuple[DpSpan, ...]:
    """The spans in the `run` of a manifest; none where it does not tell."""
    try:
        spans = tuple(DpSpan(**entry) for entry in run.get(KEY, ()))
        sound = all(type(n) is int and n > 0 for span in spans for n in span)
        sound &= all(span.first_step <= span.last_step for span in spans)
        sound &= all(a.last_step < b.first_step for a, b in pairwise(spans))
    except (TypeError, AttributeError):
        sound, spans = False, ()
    if not sound:
        raise ArtifactError(f"the manifest of a step has {KEY} that are none: {run.get(KEY)!r}")
    return spans
