"""Several classifiers as one: the mean of the probabilities that they saved for the same examples,
as Megatron-LM's ensemble_classifier averages softmaxes. numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainyard.errors import ConfigError, DataError
from trainyard.evaluation.compare import check_comparable
from trainyard.evaluation.metrics import Metric, Row, Summary
from trainyard.evaluation.passport import ScoredSet

ROUNDED_ONE = 1.001
"""A probability that 16 bits rounded may be a little above 1."""
METRICS = {"accuracy": Metric("is_right")}


def ensemble(members: Sequence[ScoredSet]) -> tuple[list[Row], Summary]:
    """The rows of the mean, and its accuracy. Raises ConfigError for members of another protocol or
    other data, DataError for rows without probabilities of the same classes."""
    if len(members) < 2:
        raise ConfigError("an ensemble has at least two members; name the folders of two or more")
    for other in members[1:]:
        check_comparable(members[0], other)
    columns = [member.rows() for member in members]
    counts = {len(column) for column in columns}
    if len(counts) > 1 or 0 in counts:
        numbers = " and ".join(str(len(column)) for column in columns)
        raise DataError(
            f"{members[0].rows_url} and those of the other folders have {numbers} rows; they need "
            "the same examples, at least one: evaluate again"
        )
    rows = []
    for number, found in enumerate(zip(*columns, strict=True)):
        shapes = [np.shape(_probabilities(m, row)) for m, row in zip(members, found, strict=True)]
        alike = len({(row["example"], row.get("gold")) for row in found}) == 1
        if not alike or len(set(shapes)) != 1:
            raise DataError(
                f"row {number}, from 0, of {members[0].rows_url} is of another example or has "
                "other classes than in the other folders"
            )
        mean = np.mean([row["probabilities"] for row in found], axis=0)
        gold = found[0]["gold"]
        rows.append(
            {
                "example": found[0]["example"],
                "gold": gold,
                "is_right": int(mean.argmax() == gold),
                "probabilities": mean.tolist(),
            }
        )
    totals = {"num_correct": sum(row["is_right"] for row in rows), "num_examples": len(rows)}
    accuracy = METRICS["accuracy"].document(rows)["value"]
    return rows, Summary({"accuracy": accuracy, **totals}, METRICS)


def _probabilities(member: ScoredSet, row: Row) -> list[float]:
    found, gold = row.get("probabilities"), row.get("gold")
    are_some = isinstance(found, list) and bool(found) and all(map(_is_probability, found))
    if not are_some or type(gold) is not int:
        raise DataError(
            f"{member.rows_url}: example {row['example']} has no probabilities of classes; only "
            "tasks with choices or classes save them"
        )
    assert isinstance(found, list)
    return found


def _is_probability(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= ROUNDED_ONE
