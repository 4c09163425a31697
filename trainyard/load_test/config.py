"""Options of load tests: what is asked, how requests come, what is good enough. No numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from trainyard.config import (
    MAX_SAMPLES,
    check_above_zero,
    check_at_least,
    check_at_most,
    differing,
    flag,
    location,
)
from trainyard.errors import ConfigError
from trainyard.load_test.lengths import LengthDistribution, parse_lengths
from trainyard.load_test.slo import Slo, parse_slo

MAX_REQUESTS = 1_000_000
MAX_CONCURRENCY = 65_536
MAX_RATE = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTestConfig:
    """Send requests to a server, or to the dynamic engine, as users would, and measure each."""

    url: str | None = None
    """Measure the OpenAI-compatible server at this address, such as http://127.0.0.1:5000. A key
    comes from the variable OPENAI_API_KEY."""
    endpoint: Literal["completions", "chat"] = "completions"
    """Of the server: completions (/v1/completions) or chat (/v1/chat/completions)."""
    model: str | None = None
    """Name of the model in requests to the server; unset: the first that it lists."""
    concurrency: tuple[int, ...] = ()
    """Closed loop: keep this many requests under way. Several values are measured in turn. Without
    this, --request-rate and --trace-file, all requests are sent at once."""
    request_rate: tuple[float, ...] = ()
    """Open loop: send this many requests a second, whatever the server does. Several values are
    measured in turn."""
    arrivals: Literal["poisson", "constant"] = "poisson"
    """With --request-rate: gaps between requests are random (independent users) or all the same."""
    duration_seconds: float | None = None
    """With --request-rate or --sweep: send for this long, in place of --num-requests."""
    trace_file: str | None = location(None)
    """Replay the requests of this .jsonl file at their times: on each line timestamp in ms,
    text_input or input_length, and output_length (Mooncake's format)."""
    num_requests: int | None = None
    """Requests of each measurement; unset: each prompt once, or --inference-max-requests random
    ones."""
    input_lengths: str | None = None
    """Lengths in tokens of random prompts: N, fixed:N, uniform:LOW:HIGH, normal:MEAN:STDDEV or
    lognormal:MEAN:STDDEV."""
    output_lengths: str | None = None
    """Most tokens of each output, as --input-lengths; unset: --num-tokens-to-generate."""
    goodput: tuple[str, ...] = ()
    """What a request must meet to count for goodput, in milliseconds: ttft:500 (first token),
    tpot:50 (time per output token), e2el:2000 (end to end)."""
    sweep: bool = False
    """Find the highest --request-rate, from the given one on (or 1), that meets --goodput."""
    slo_attainment: float = 0.99
    """Of --sweep: share of all requests that must meet --goodput."""
    sweep_max_probes: int = 12
    """Most rates that --sweep measures."""
    sweep_tolerance: float = 0.05
    """--sweep ends when a rate that meets is this near to one that does not, in parts of it."""
    request_timeout_seconds: float = 600.0
    """A request that takes longer has failed."""

    def __post_init__(self) -> None:
        """Refuse values out of range, and options that exclude each other."""
        counts = ("num_requests", "sweep_max_probes")
        check_at_least(self, 1, *counts)
        check_at_most(self, MAX_REQUESTS, *counts)
        check_above_zero(self, "duration_seconds", "request_timeout_seconds", "sweep_tolerance")
        check_at_most(self, 1, "sweep_tolerance")
        check_at_most(self, MAX_SAMPLES, "duration_seconds", "request_timeout_seconds")
        if not all(1 <= number <= MAX_CONCURRENCY for number in self.concurrency):
            raise ConfigError(f"--concurrency must be from 1 to {MAX_CONCURRENCY}")
        if not all(0 < rate <= MAX_RATE for rate in self.request_rate):
            raise ConfigError(f"--request-rate must be above 0 and at most {MAX_RATE:g} a second")
        if not 0 < self.slo_attainment <= 1:
            raise ConfigError(f"--slo-attainment is a share in (0, 1], got {self.slo_attainment}")
        self._check_loop()
        self._check_url()
        self.inputs()
        self.outputs()
        self.slo()

    def inputs(self) -> LengthDistribution | None:
        """Of --input-lengths."""
        text = self.input_lengths
        return None if text is None else parse_lengths(text, "--input-lengths")

    def outputs(self) -> LengthDistribution | None:
        """Of --output-lengths."""
        text = self.output_lengths
        return None if text is None else parse_lengths(text, "--output-lengths")

    def slo(self) -> Slo | None:
        """Of --goodput."""
        return parse_slo(self.goodput, "--goodput")

    def _check_loop(self) -> None:
        loops = ("concurrency", "request_rate", "trace_file")
        given = [name for name in loops if getattr(self, name)]
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(map(flag, given))} are ways to send requests; give one of them"
            )
        if self.trace_file is not None and not self.trace_file.endswith(".jsonl"):
            raise ConfigError(f"--trace-file {self.trace_file}: the name must end with .jsonl")
        if self.trace_file is not None and self.num_requests is not None:
            raise ConfigError("--trace-file has its own number of requests; leave --num-requests")
        has_rate = bool(self.request_rate or self.sweep)
        if self.duration_seconds and (not has_rate or self.num_requests is not None):
            raise ConfigError(
                "--duration-seconds is of --request-rate and --sweep, and takes the place of "
                "--num-requests"
            )
        if self.sweep and (self.concurrency or self.trace_file or len(self.request_rate) > 1):
            raise ConfigError("--sweep chooses rates; give at most one --request-rate to begin at")
        if self.sweep and not self.goodput:
            raise ConfigError("--sweep needs --goodput, such as --goodput ttft:500 tpot:50")
        if not self.sweep:
            for name in ("slo_attainment", "sweep_max_probes", "sweep_tolerance"):
                if name in differing(self):
                    raise ConfigError(f"{flag(name)} is of --sweep; give that too")

    def _check_url(self) -> None:
        if self.url is None:
            for name in ("endpoint", "model"):
                if name in differing(self):
                    raise ConfigError(f"{flag(name)} is of --url; give that too")
            return
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"--url {self.url!r} is no address of a server; write http://HOST:PORT"
            )
        if parts.username or parts.password:
            raise ConfigError("--url: a key belongs in the variable OPENAI_API_KEY, not in the URL")
