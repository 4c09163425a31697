"""Figures of hand-made records; conservation of requests and tokens."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.errors import ConfigError
from trainyard.load_test.metrics import concurrency_steps, meets, spread, summarize
from trainyard.load_test.records import RequestRecord, record_of
from trainyard.load_test.slo import parse_slo


def record(sent: float, times: list[float], tokens: int | None = None) -> RequestRecord:
    return RequestRecord(
        index=0,
        sent_at=sent,
        ended_at=times[-1] + 0.25,
        token_times=times,
        prompt_tokens=4,
        output_tokens=len(times) if tokens is None else tokens,
    )


def test_latencies_have_the_definitions_of_the_field() -> None:
    # Four tokens in three pieces: two came together, so gaps are of pieces, and TPOT is of tokens.
    found = summarize([record(1.0, [2.0, 2.5, 4.0], tokens=4), record(0.0, [3.0])])
    assert found["ttft"]["mean"] == 2.0
    assert found["ttft"]["p50"] == 2.0
    assert found["e2el"]["mean"] == 3.0
    assert found["tpot"]["mean"] == pytest.approx((4.0 - 2.0) / 3)  # not of the one of one token
    assert found["itl"]["mean"] == 1.0  # the gaps 0.5 and 1.5; the first token's time is in neither
    assert found["latency_per_output_token"] == pytest.approx((3.0 + 3.0) / 5)
    assert found["duration_seconds"] == 4.25
    assert found["requests_per_second"] == pytest.approx(2 / 4.25)
    assert found["goodput"] is found["slo_attainment"] is None


def test_goodput_counts_requests_that_meet_all_limits() -> None:
    slo = parse_slo(["ttft:1000", "tpot:500", "e2el:5000"], "--goodput")
    records = [
        record(0.0, [1.0, 1.5]),  # on the limits
        record(0.0, [1.1, 1.2]),  # the first token is late
        record(0.0, [0.5, 1.1]),  # 600 ms a token
        record(0.0, [0.5, 5.5], tokens=20),  # the end is late
        record(0.0, [0.5]),  # one token has no time per token
        RequestRecord(index=5, ended_at=1.0, error="HTTP 500"),
    ]
    found = summarize(records, slo)
    assert found["num_good"] == 2
    assert found["slo_attainment"] == pytest.approx(2 / 6)
    assert found["goodput"] == pytest.approx(2 / 5.75)
    assert not meets(found, 0.34)
    assert meets(found, 1 / 3)


@pytest.mark.parametrize("words", ["itl:5", "ttft", "ttft:0", "ttft:-1", "ttft:x", "tpot:nan"])
def test_a_wrong_slo_is_refused(words: str) -> None:
    with pytest.raises(ConfigError, match=r"--goodput .*in milliseconds, as in ttft:500"):
        parse_slo([words], "--goodput")
    with pytest.raises(ConfigError, match="names ttft twice"):
        parse_slo(["ttft:5", "ttft:6"], "--goodput")


def test_percentiles_interpolate_as_those_of_numpy() -> None:
    values = [0.4, 0.1, 0.3, 0.2]
    found = spread(values)
    assert found is not None
    assert found["p50"] == pytest.approx(0.25)  # by hand: halfway between 0.2 and 0.3
    assert found["p90"] == pytest.approx(0.37)  # at 2.7 of 0..3: 0.3 + 0.7 * 0.1
    assert found["p99"] == pytest.approx(0.397)
    many = np.random.default_rng(1).exponential(size=1001)
    found = spread(many.tolist())
    assert found is not None
    for p in (50, 90, 95, 99):
        assert found[f"p{p}"] == np.percentile(many, p)
    assert spread([]) is None


TIMES = st.floats(0, 1e3)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(TIMES, st.lists(TIMES, max_size=5), st.booleans()), max_size=8))
def test_no_request_and_no_token_is_lost(
    rows: list[tuple[float, list[float], bool]],
) -> None:
    records = []
    for sent, pauses, failed in rows:
        times = np.cumsum([sent, *pauses])[1:].tolist()
        end = times[-1] if times else sent
        error = "an error" if failed or not times else None
        one = RequestRecord(index=0, sent_at=sent, ended_at=end, token_times=times, error=error)
        one.output_tokens = len(times)
        records.append(one)
    found = summarize(records, parse_slo(["e2el:1000"], ""))
    ok = [one for one in records if one.is_ok]
    assert found["num_completed"] + found["num_failed"] == len(records)
    assert sum(found["errors"].values()) == found["num_failed"]
    assert found["output_tokens"] == sum(one.output_tokens for one in ok)
    assert found["num_good"] <= found["num_completed"]
    if ok:
        # All gaps and all times to first tokens together are all latencies.
        gaps = sum(sum(one.gaps) for one in ok)
        total = found["ttft"]["mean"] * len(ok) + gaps
        assert math.isclose(total, found["e2el"]["mean"] * len(ok), abs_tol=1e-6)
        seconds = found["duration_seconds"]
        if seconds:
            assert found["output_tokens_per_second"] * seconds == pytest.approx(
                found["output_tokens"]
            )
    steps = concurrency_steps(records)
    assert not steps or steps[-1][1] == 0
    json.dumps(found, allow_nan=False)


def test_the_raw_lines_give_the_same_figures() -> None:
    records = [record(1.0, [2.0, 2.5, 4.0]), RequestRecord(index=1, ended_at=9.0, error="cut")]
    lines = [json.dumps(one.document()) for one in records]
    assert summarize([record_of(json.loads(line)) for line in lines]) == summarize(records)
    assert json.loads(lines[0])["tpot"] == 1.0
