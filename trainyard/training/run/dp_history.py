"""The number of data-parallel ranks of each step of a run.

A run may resume on another number of ranks with the same ledger. But rank, row and micro-batch of a
sample depend on it, and with --dataloader-type cyclic even the samples of a step. So each step
records it in the `run` of its manifest, which no digest covers:

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
    """Consecutive steps, both ends included, on the same number of ranks."""

    first_step: int
    last_step: int
    data_parallel_size: int
    micro_batch_size: int


def with_steps(spans: Sequence[DpSpan], new: DpSpan) -> tuple[DpSpan, ...]:
    """The spans extended by newer steps, if there are any."""
    if new.last_step < new.first_step:
        return tuple(spans)
    last = spans[-1] if spans else None
    if last is not None and last[2:] == new[2:] and last.last_step + 1 == new.first_step:
        return (*spans[:-1], last._replace(last_step=new.last_step))
    return (*spans, new)


def spans_document(spans: Sequence[DpSpan]) -> dict[str, Any]:
    """The entry in the manifest of a step."""
    return {KEY: [span._asdict() for span in spans]}


def spans_of_step(root_url: str, step: int) -> tuple[DpSpan, ...]:
    """The spans up to this step, as far as they are recorded."""
    found = read_manifest(join(root_url, step_folder(step), MANIFEST))
    return parse_spans(found[0].run) if found is not None else ()


def parse_spans(run: Mapping[str, Any]) -> tuple[DpSpan, ...]:
    """The spans in the `run` of a manifest; empty if it has none."""
    try:
        spans = tuple(DpSpan(**entry) for entry in run.get(KEY, ()))
        sound = all(type(n) is int and n > 0 for span in spans for n in span)
        sound &= all(span.first_step <= span.last_step for span in spans)
        sound &= all(a.last_step < b.first_step for a, b in pairwise(spans))
    except (TypeError, AttributeError):
        sound, spans = False, ()
    if not sound:
        raise ArtifactError(f"the manifest of a step has invalid {KEY}: {run.get(KEY)!r}")
    return spans
