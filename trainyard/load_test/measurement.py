"""Measurements of a load test: one for each way to send requests, or a search for a rate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainyard.load_test.arrivals import arrival_times, arrivals_within
from trainyard.load_test.config import LoadTestConfig
from trainyard.load_test.driver import LoadDriver, Target
from trainyard.load_test.metrics import meets, summarize
from trainyard.load_test.records import RequestRecord
from trainyard.load_test.sweep import RateSearch
from trainyard.load_test.workload import PlannedRequest, stream

log = logging.getLogger(__name__)

LATE_SECONDS = 0.1
"""A load generator that sends later than this does not keep its rate."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one way to send requests gave."""

    name: str
    """Of the way, as "8 requests at once"."""
    concurrency: int | None
    """Of a closed loop."""
    request_rate: float | None
    """Of an open loop, requests a second."""
    records: list[RequestRecord]
    summary: dict[str, Any]

    def document(self) -> dict[str, Any]:
        """For summary.json."""
        ways = {"concurrency": self.concurrency, "request_rate": self.request_rate}
        return {"name": self.name, **ways, **self.summary}


@dataclass(frozen=True, slots=True)
class LoadTestResult:
    """All measurements, in their order, and what a sweep found."""

    measurements: list[Measurement]
    highest_rate: float | None = None
    """The highest rate that met the SLO; None without a sweep, or if no rate did."""
    failed_rate: float | None = None
    """The lowest rate that did not meet it."""
    is_narrow: bool = False
    """Whether these two are as near to each other as asked for."""
    is_burst: bool = False
    """Whether a sweep ended since all requests were under way at once at the highest rate, so that
    a higher one asks no more of the target."""

    @property
    def completed(self) -> int:
        """Requests that were answered."""
        return sum(one.summary["num_completed"] for one in self.measurements)

    def errors(self) -> list[str]:
        """The kinds of errors of all measurements, each once."""
        return list(dict.fromkeys(e for one in self.measurements for e in one.summary["errors"]))


class LoadTest:
    """Sends the same requests in each measurement."""

    def __init__(
        self,
        config: LoadTestConfig,
        target: Target,
        make_requests: Callable[[int | None], list[PlannedRequest]],
        *,
        trace_times: Sequence[float] = (),
        seed: int,
        on_end: Callable[[int], object] = lambda count: None,
    ) -> None:
        """make_requests: this many, or as many as the options say. trace_times: of --trace-file."""
        self._config, self._make_requests, self._seed = config, make_requests, seed
        self._trace_times = trace_times
        self._slo = config.slo()
        self._driver = LoadDriver(target, config.request_timeout_seconds, on_end)
        self._warm = LoadDriver(target, config.request_timeout_seconds)

    async def warm_up(self, count: int) -> None:
        """Send a few requests that no figure counts."""
        for record in await self._warm.closed_loop(self._make_requests(None)[:count], 1):
            if record.error is not None:
                log.warning("a request of the warm-up failed: %s", record.error)

    async def run(self, repeat: int = 1) -> LoadTestResult:
        """All measurements that the options name, each `repeat` times in turn."""
        config = self._config
        if config.sweep:
            return await self._sweep(config.request_rate[0] if config.request_rate else 1.0)
        found = []
        for _ in range(repeat):
            found += [await self._closed(number) for number in config.concurrency]
            found += [await self._open(rate) for rate in config.request_rate]
            if self._trace_times:
                requests = self._make_requests(None)
                records = await self._driver.open_loop(requests, self._trace_times)
                found.append(self._measured("the trace's times", None, None, records))
            if not (config.concurrency or config.request_rate or self._trace_times):
                found.append(await self._all_at_once())
        return LoadTestResult(found)

    async def _sweep(self, first: float) -> LoadTestResult:
        config = self._config
        search = RateSearch(first, config.sweep_max_probes, config.sweep_tolerance)
        found = []
        while (rate := search.next_rate()) is not None:
            measurement = await self._open(rate)
            found.append(measurement)
            met = meets(measurement.summary, config.slo_attainment)
            search.record(rate, met)
            share = measurement.summary["slo_attainment"]
            verdict = "meets" if met else "misses"
            log.info("%s: %.1f %% of requests are good; %s", measurement.name, 100 * share, verdict)
            if met and search.failed is None and self._is_burst(measurement):
                return LoadTestResult(found, search.best, is_burst=True)
        return LoadTestResult(found, search.best, search.failed, search.is_narrow)

    def _is_burst(self, one: Measurement) -> bool:
        """Whether all requests that there are were under way at one time."""
        has_number = self._config.duration_seconds is None
        return has_number and one.summary["max_concurrency"] == len(one.records)

    async def _closed(self, concurrency: int) -> Measurement:
        records = await self._driver.closed_loop(self._make_requests(None), concurrency)
        return self._measured(f"{concurrency} at a time", concurrency, None, records)

    async def _all_at_once(self) -> Measurement:
        requests = self._make_requests(None)
        records = await self._driver.closed_loop(requests, len(requests))
        return self._measured("all at once", len(requests), None, records)

    async def _open(self, rate: float) -> Measurement:
        config, generator = self._config, stream(self._seed, "arrivals")
        if config.duration_seconds is not None:
            within = config.duration_seconds
            times = arrivals_within(config.arrivals, rate, within, generator)
            requests = self._make_requests(len(times))
        else:
            requests = self._make_requests(None)
            times = arrival_times(config.arrivals, rate, len(requests), generator)
        records = await self._driver.open_loop(requests, times)
        return self._measured(f"{rate:.4g} requests/s", None, rate, records)

    def _measured(
        self, name: str, concurrency: int | None, rate: float | None, records: list[RequestRecord]
    ) -> Measurement:
        summary = summarize(records, self._slo)
        lag = summary["send_lag"]
        if lag is not None and lag["p99"] > LATE_SECONDS:
            log.warning(
                "%s: 1 %% of requests were sent %.2f s late or more: this machine does not keep "
                "the rate, so its latencies say little about the server",
                name,
                lag["p99"],
            )
        return Measurement(name, concurrency, rate, records, summary)
