"""What happened to one request of a load test, and its latencies.

Times are seconds since the start of the measurement. The definitions are those of vLLM's
`bench serve` and of AIPerf: see each property."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request, from when it was to be sent until its end."""

    index: int
    scheduled_at: float | None = None
    """When an open loop was to send it; None in a closed loop."""
    sent_at: float = 0.0
    ended_at: float = 0.0
    """When the answer was complete, or failed."""
    token_times: list[float] = field(default_factory=list)
    """When each piece with text arrived; a piece may hold several tokens."""
    prompt_tokens: int | None = None
    """As the server counted them; else as they were sent; None where neither is known."""
    output_tokens: int = 0
    """As the server counted them; where it did not, the pieces."""
    is_counted_by_server: bool = False
    """Whether `output_tokens` is the server's count."""
    finish_reason: str | None = None
    error: str | None = None
    """Why it failed; None if it did not."""

    @property
    def is_ok(self) -> bool:
        """Whether it was answered in full, so that it has latencies."""
        return self.error is None

    @property
    def ttft(self) -> float:
        """Time to first token: from sending to the first piece that has text."""
        return self.token_times[0] - self.sent_at

    @property
    def e2el(self) -> float:
        """End-to-end latency: from sending to the last piece that has text."""
        return self.token_times[-1] - self.sent_at

    @property
    def tpot(self) -> float | None:
        """Time per output token: (end-to-end latency - time to first token) / (tokens - 1); None
        for one token."""
        if self.output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Between one piece and the next: its inter-token latencies, without the first token's."""
        return [after - before for before, after in pairwise(self.token_times)]

    @property
    def send_lag(self) -> float | None:
        """How late an open loop sent it."""
        return None if self.scheduled_at is None else self.sent_at - self.scheduled_at

    def document(self) -> dict[str, Any]:
        """A line of requests.jsonl: what was seen, and the latencies that follow from it."""
        seen = {name: getattr(self, name) for name in SEEN}
        if not self.is_ok:
            return seen
        return seen | {"ttft": self.ttft, "tpot": self.tpot, "e2el": self.e2el}


SEEN = (
    *("index", "scheduled_at", "sent_at", "ended_at", "token_times", "prompt_tokens"),
    *("output_tokens", "is_counted_by_server", "finish_reason", "error"),
)


def record_of(document: Mapping[str, Any]) -> RequestRecord:
    """The record of a line of requests.jsonl."""
    return RequestRecord(**{name: document[name] for name in SEEN})
