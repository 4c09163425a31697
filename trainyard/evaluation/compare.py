"""Compares two evaluations of one data set, by paired tests over its examples.

A difference of figures that are means of zeros and ones is tested by McNemar's exact test: of the
examples that only one of the two got right, each side would have half (Biometrika 12, 1947). Any
other difference by the paired bootstrap: examples are drawn with replacement, for both evaluations
the same ones, and the share of draws on the other side of zero, doubled, is the p-value (Koehn,
EMNLP 2004). The interval of 95 % is that of the same draws.

With another tokenizer a text falls into other windows, and nothing can be paired. Figures that do
not depend on tokens are then compared by their standard errors, as if the texts were two. numpy
only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainyard.artifacts.digest import SHORT
from trainyard.errors import ConfigError, DataError
from trainyard.evaluation.metrics import Floats, Metric, Row
from trainyard.evaluation.passport import ScoredSet

RESAMPLES = 2000
SEED = 1234
NORMAL_95 = 1.959964
"""Standard deviations on each side of an interval of 95 %."""
CHUNK_NUMBERS = 2**22
"""Numbers of a piece of the resampling: bounds its memory."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one figure, B - A."""

    name: str
    a: float
    b: float
    better: str
    """higher or lower."""
    low: float
    """Lower end of the interval of 95 % of the difference."""
    high: float
    p_value: float
    test: str
    count: int
    """Examples compared."""

    @property
    def difference(self) -> float:
        """B - A."""
        return self.b - self.a


def check_comparable(a: ScoredSet, b: ScoredSet) -> None:
    """Raise ConfigError, with all that differs, for evaluations whose figures mean different
    things: by another protocol or of other data. Checkpoints, tokenizers and code may differ."""
    differ = []
    for part in ("protocol", "data"):
        ours, theirs = a.passport[part], b.passport[part]
        if ours["digest"] != theirs["digest"]:
            differ.append(f"their {part} ({_described(part, ours, theirs)})")
    if differ:
        raise ConfigError(
            f"{a.folder} and {b.folder} cannot be compared on {a.name!r} and {b.name!r}: they "
            f"differ in {' and in '.join(differ)}; evaluate both alike"
        )


def _described(part: str, a: Mapping[str, object], b: Mapping[str, object]) -> str:
    """What differs, as far as the passports say it."""
    if part == "data":
        return f"digests {str(a['digest'])[:SHORT]} and {str(b['digest'])[:SHORT]}"
    ours, theirs = ({"name": p.get("name"), **_table(p.get("definition"))} for p in (a, b))
    keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    return "; ".join(f"{key}: {ours.get(key)!r} and {theirs.get(key)!r}" for key in keys)


def _table(found: object) -> Mapping[str, object]:
    return found if isinstance(found, dict) else {}


def compare(a: ScoredSet, b: ScoredSet) -> list[Difference]:
    """The differences of the figures that both have and that mean the same. Raises ConfigError for
    evaluations that are not comparable, DataError for rows that do not match."""
    check_comparable(a, b)
    rows_a, rows_b = a.rows(), b.rows()
    is_paired = [row["example"] for row in rows_a] == [row["example"] for row in rows_b]
    if not is_paired and same_tokens(a, b):
        raise DataError(
            f"{a.rows_url} has {len(rows_a)} rows and {b.rows_url} {len(rows_b)}, of other "
            "examples; one of the files was cut or changed: evaluate again"
        )
    apart = left_out(a, b)
    found = []
    for name in (name for name in a.metrics if name in b.metrics and name not in apart):
        metrics = a.metrics[name], b.metrics[name]
        if is_paired and (same_tokens(a, b) or metrics[0].weight is None):
            found.append(_paired_difference(name, metrics, rows_a, rows_b))
        else:
            found.append(_unpaired_difference(name, metrics, rows_a, rows_b))
    return found


def same_tokens(a: ScoredSet, b: ScoredSet) -> bool:
    """Whether both have one tokenizer."""
    return bool(a.passport["tokenizer"]["digest"] == b.passport["tokenizer"]["digest"])


def left_out(a: ScoredSet, b: ScoredSet) -> list[str]:
    """Figures that are not compared, as they are per token and the tokenizers differ."""
    if same_tokens(a, b):
        return []
    return [name for name, metric in a.metrics.items() if metric.of_tokens]


def _unpaired_difference(
    name: str, metrics: tuple[Metric, Metric], rows_a: Sequence[Row], rows_b: Sequence[Row]
) -> Difference:
    documents = [m.document(rows) for m, rows in zip(metrics, (rows_a, rows_b), strict=True)]
    if any(found["stderr"] is None for found in documents):
        raise DataError(f"{name!r} has no standard error, for which two examples are needed")
    values = [found["value"] for found in documents]
    stderr = math.hypot(*(found["stderr"] for found in documents))
    difference = values[1] - values[0]
    p_value = math.erfc(abs(difference) / stderr / math.sqrt(2)) if stderr else 1.0
    low, high = difference - NORMAL_95 * stderr, difference + NORMAL_95 * stderr
    return Difference(
        name=name,
        a=values[0],
        b=values[1],
        better=metrics[0].better,
        low=low,
        high=high,
        p_value=p_value,
        test="unpaired, by standard errors",
        count=min(len(rows_a), len(rows_b)),
    )


def _paired_difference(
    name: str, metrics: tuple[Metric, Metric], rows_a: Sequence[Row], rows_b: Sequence[Row]
) -> Difference:
    key = metrics[0].total
    pairs = [
        (x, y)
        for x, y in zip(rows_a, rows_b, strict=True)
        if x.get(key) is not None and y.get(key) is not None
    ]
    sums_a, sums_b = (
        metric.sums([pair[side] for pair in pairs]) for side, metric in enumerate(metrics)
    )
    if not pairs or not all(weights.sum() for _, weights in (sums_a, sums_b)):
        raise DataError(f"no example has the figure {name!r} in both evaluations")
    values = [
        metric.value(math.fsum(totals), float(weights.sum()))
        for metric, (totals, weights) in zip(metrics, (sums_a, sums_b), strict=True)
    ]
    draws = _resampled(metrics, sums_a, sums_b)
    low, high = (float(end) for end in np.quantile(draws, (0.025, 0.975)))
    is_binary = metrics[0].weight is None and _is_binary(sums_a[0]) and _is_binary(sums_b[0])
    p_value = mcnemar(sums_a[0], sums_b[0]) if is_binary else bootstrap_p(draws)
    test = "McNemar, exact" if is_binary else f"paired bootstrap, {RESAMPLES} draws"
    return Difference(
        name=name,
        a=values[0],
        b=values[1],
        better=metrics[0].better,
        low=low,
        high=high,
        p_value=p_value,
        test=test,
        count=len(pairs),
    )


def _is_binary(totals: Floats) -> bool:
    return bool(np.isin(totals, (0.0, 1.0)).all())


def _resampled(
    metrics: tuple[Metric, Metric], a: tuple[Floats, Floats], b: tuple[Floats, Floats]
) -> Floats:
    """(RESAMPLES,) differences B - A over examples drawn with replacement."""
    columns = np.stack([*a, *b])  # (4, n)
    sums = np.concatenate(list(_sums_of_draws(columns)))  # (RESAMPLES, 4)
    return np.array(
        [metrics[1].value(row[2], row[3]) - metrics[0].value(row[0], row[1]) for row in sums]
    )


def _sums_of_draws(columns: Floats) -> Iterator[Floats]:
    generator, n = np.random.default_rng(SEED), columns.shape[1]
    size = max(1, CHUNK_NUMBERS // n)
    for first in range(0, RESAMPLES, size):
        drawn = generator.integers(0, n, size=(min(size, RESAMPLES - first), n))
        yield np.stack([column[drawn].sum(axis=1) for column in columns], axis=1)


def mcnemar(a: Floats, b: Floats) -> float:
    """The two-sided exact p-value of two rows of zeros and ones, paired."""
    only_a, only_b = int((a > b).sum()), int((b > a).sum())
    discordant, fewer = only_a + only_b, min(only_a, only_b)
    if discordant == 0:
        return 1.0
    # In logarithms: 2 ** 5000 is no float.
    terms = [_log_choose(discordant, k) - discordant * math.log(2) for k in range(fewer + 1)]
    return min(1.0, 2.0 * math.fsum(math.exp(term) for term in terms))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def bootstrap_p(draws: Floats) -> float:
    """Two-sided, at least 1 in the number of draws plus one; 1 where nothing differs."""
    below, above = int((draws <= 0).sum()), int((draws >= 0).sum())
    return min(1.0, 2.0 * (min(below, above) + 1) / (len(draws) + 1))
