"""Figures over all requests of a measurement.

Latencies are of requests that were answered in full; those that failed are counted, miss every SLO,
and add no token to a throughput. Percentiles interpolate linearly between the two nearest values,
as numpy's do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainyard.load_test.records import RequestRecord
from trainyard.load_test.slo import Slo

PERCENTILES = (50, 90, 95, 99)

LATENCIES = ("ttft", "tpot", "itl", "e2el")
"""Time to first token, time per output token, inter-token latency, end-to-end latency."""


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, standard deviation of the values themselves, least, greatest, percentiles; None
    without any value."""
    if not values:
        return None
    found = np.asarray(values, dtype=np.float64)
    percentiles = np.percentile(found, PERCENTILES).tolist()
    return {
        "mean": float(found.mean()),
        "std": float(found.std()),
        "min": float(found.min()),
        "max": float(found.max()),
        **{f"p{p}": value for p, value in zip(PERCENTILES, percentiles, strict=True)},
    }


def summarize(records: Sequence[RequestRecord], slo: Slo | None = None) -> dict[str, Any]:
    """The figures of a measurement, times in seconds, rates per second.

    Its duration is from its start to the end of its last request. `goodput` is the rate of requests
    that meet the whole SLO, `slo_attainment` their share of all."""
    ok = [record for record in records if record.is_ok]
    seconds = max((record.ended_at for record in records), default=0.0)
    output = sum(record.output_tokens for record in ok)
    prompts = [record.prompt_tokens for record in ok]
    has_prompts = bool(ok) and None not in prompts
    prompt = sum(count or 0 for count in prompts) if has_prompts else None
    good = sum(map(slo.is_met, records)) if slo else None
    return {
        "num_requests": len(records),
        "num_completed": len(ok),
        "num_failed": len(records) - len(ok),
        "errors": dict(Counter(r.error for r in records if r.error is not None).most_common()),
        "duration_seconds": seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "tokens_counted_by_server": all(record.is_counted_by_server for record in ok),
        "requests_per_second": _rate(len(ok), seconds),
        "output_tokens_per_second": _rate(output, seconds),
        "total_tokens_per_second": _rate(None if prompt is None else prompt + output, seconds),
        "num_good": good,
        "goodput": _rate(good, seconds),
        "slo_attainment": None if good is None or not records else good / len(records),
        **_latencies(ok),
        "latency_per_output_token": sum(r.e2el for r in ok) / output if output else None,
        "max_concurrency": most_at_once(records),
        "send_lag": spread([lag for r in records if (lag := r.send_lag) is not None]),
    }


def _latencies(ok: Sequence[RequestRecord]) -> dict[str, Any]:
    """Of each of LATENCIES its spread; inter-token latencies are pooled over all requests."""
    return {
        "ttft": spread([record.ttft for record in ok]),
        "tpot": spread([tpot for record in ok if (tpot := record.tpot) is not None]),
        "itl": spread([gap for record in ok for gap in record.gaps]),
        "e2el": spread([record.e2el for record in ok]),
    }


def _rate(count: int | None, seconds: float) -> float | None:
    return None if count is None or seconds <= 0 else count / seconds


def concurrency_steps(records: Sequence[RequestRecord]) -> list[tuple[float, int]]:
    """(time, requests under way from then on), by time. One that ends as another is sent frees its
    place first."""
    changes = [(r.ended_at, -1) for r in records] + [(r.sent_at, 1) for r in records]
    steps, count = [], 0
    for at, change in sorted(changes):
        count += change
        steps.append((at, count))
    return steps


def most_at_once(records: Sequence[RequestRecord]) -> int:
    """The most requests that were under way at one time."""
    return max((count for _, count in concurrency_steps(records)), default=0)


def meets(summary: Mapping[str, Any], attainment: float) -> bool:
    """Whether at least this share of all requests met the SLO."""
    found = summary["slo_attainment"]
    return found is not None and found >= attainment
