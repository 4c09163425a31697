"""What the server measures, as Prometheus reads it at /metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trainyard.serving.service import EngineService

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
GAUGES = {
    "num_running": ("requests_running", "Texts that the engine computes"),
    "num_waiting": ("requests_waiting", "Texts that wait in the engine"),
    "blocks_used": ("cache_blocks_used", "Blocks of the cache that requests hold"),
    "blocks_total": ("cache_blocks", "Blocks of the cache"),
}
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts"),
    "cached_prompt_tokens": ("cached_prompt_tokens", "Tokens of prompts found in the cache"),
    "generated_tokens": ("generated_tokens", "Tokens that were generated"),
    "preemptions": ("preemptions", "Requests that gave up their blocks and are computed again"),
}
"""By field of EngineStats: name without its prefix, and meaning."""
OTHER = "other"
"""Label of paths that are no route: whoever asks for many makes no new series."""


class Metrics:
    """All series of one server."""

    def __init__(self, service: EngineService) -> None:
        self.paths: set[str] = set()
        """Of the routes."""
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(service))
        self._answers = Counter(
            "trainyard_http_requests",
            "Requests answered",
            ("path", "method", "status"),
            registry=self._registry,
        )
        self._seconds = self._histogram("http_request_seconds", "From request to answer", ("path",))
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From a request to the first token of a text"
        )
        self.per_token = self._histogram(
            "time_per_output_token_seconds", "Of each token of a text behind its first"
        )

    def answered(self, path: str, method: str, status: int, seconds: float) -> None:
        """Count a request. status: 0 if the answer never began."""
        known = path if path in self.paths else OTHER
        verb = method if method in ("GET", "POST", "PUT", "HEAD", "OPTIONS") else OTHER
        self._answers.labels(known, verb, str(status)).inc()
        self._seconds.labels(known).observe(seconds)

    def text(self) -> bytes:
        """All of them."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, meaning: str, labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(
            f"trainyard_{name}", meaning, labels, buckets=SECONDS, registry=self._registry
        )


class _EngineCollector(Collector):
    """The engine's own figures, as of its last step."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        stats = self._service.stats
        for name, (series, meaning) in GAUGES.items():
            yield GaugeMetricFamily(f"trainyard_{series}", meaning, getattr(stats, name))
        for name, (series, meaning) in COUNTERS.items():
            yield CounterMetricFamily(f"trainyard_{series}", meaning, getattr(stats, name))
        open_now = self._service.num_open
        yield GaugeMetricFamily("trainyard_requests_open", "Texts that have not ended", open_now)
