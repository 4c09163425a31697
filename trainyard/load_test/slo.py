"""The service-level objective (SLO) that a request has to meet to count for goodput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainyard.errors import ConfigError
from trainyard.load_test.records import RequestRecord

SLO_NAMES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request has to meet to count for goodput."""

    limits: tuple[tuple[str, float], ...]
    """Of `SLO_NAMES`, in seconds."""

    def is_met(self, record: RequestRecord) -> bool:
        """Whether no latency exceeds its limit; a request of one token has no time per token."""
        if not record.is_ok:
            return False
        return all((getattr(record, name) or 0.0) <= limit for name, limit in self.limits)


def parse_slo(words: Sequence[str], option: str) -> Slo | None:
    """Of words such as ttft:500, in milliseconds; None for no words. ConfigError for others."""
    limits = {}
    for word in words:
        name, _, text = word.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = -1.0
        if name not in SLO_NAMES or not 0 < limit < float("inf"):
            known = ", ".join(SLO_NAMES)
            raise ConfigError(
                f"{option} {word!r}: write the name of a latency ({known}) and its limit in "
                "milliseconds, as in ttft:500"
            )
        if name in limits:
            raise ConfigError(f"{option} names {name} twice; give one limit")
        limits[name] = limit / 1e3
    return Slo(tuple(limits.items())) if limits else None
