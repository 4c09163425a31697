"""Spans of steps on the same number of ranks: joined, written, read back."""

from __future__ import annotations

import pytest

from trainyard.errors import ArtifactError
from trainyard.training.run.dp_history import DpSpan, parse_spans, spans_document, with_steps


def test_steps_on_the_same_ranks_are_one_span() -> None:
    spans = with_steps((), DpSpan(1, 5, 2, 4))
    assert with_steps(spans, DpSpan(6, 5, 1, 4)) == spans  # none were taken
    assert with_steps(spans, DpSpan(6, 9, 2, 4)) == (DpSpan(1, 9, 2, 4),)
    changed = with_steps(spans, DpSpan(6, 9, 1, 4))
    assert changed == (DpSpan(1, 5, 2, 4), DpSpan(6, 9, 1, 4))
    assert parse_spans(spans_document(changed)) == changed
    assert parse_spans({}) == ()


@pytest.mark.parametrize(
    "entry",
    [3, {}, {"first_step": 0, "last_step": 2, "data_parallel_size": 1, "micro_batch_size": 1}],
)
def test_invalid_spans_are_refused(entry: object) -> None:
    with pytest.raises(ArtifactError, match="spans"):
        parse_spans({"spans": [entry]})
