"""What serves requests as they come: the interface between an engine and a server or a load test.

An engine is not thread-safe: one thread adds, cancels and steps. Under tensor and pipeline
parallelism the first rank has this interface, and the others follow it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from trainyard.inference.request import Completion, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What a step did for one request."""

    number: int
    """Of the request, as `add` gave it."""
    num_new: int
    """New tokens, the last of `completion.tokens`."""
    completion: Completion
    """The output so far; it continues unless `completion.is_done`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges of this moment, and counters since the start."""

    num_running: int
    num_waiting: int
    blocks_used: int
    """Blocks of the cache that requests hold."""
    blocks_total: int
    prompt_tokens: int
    """Counter: tokens of prompts that were computed or found in the cache."""
    cached_prompt_tokens: int
    """Counter: those found in the cache."""
    generated_tokens: int
    """Counter."""
    preemptions: int
    """Counter: requests that gave up their blocks and are computed again."""


class Engine(Protocol):
    """Runs any number of requests at once, as its memory allows."""

    max_tokens: int
    """Most tokens of a prompt with its output."""

    def add(self, request: Request, *, priority: int = 0) -> int:
        """Queue a request; return its number. Lower priorities run first.

        Raises ConfigError if it could never run: no token, or more than `max_tokens`."""

    def cancel(self, number: int) -> None:
        """Drop a request and free what it holds; one that has ended is let be."""

    def step(self) -> list[Update]:
        """Compute once for what runs now. Empty if there is nothing to do; over several ranks it is
        called every second all the same, so that the others know that this one lives."""

    def has_work(self) -> bool:
        """Whether a step would compute anything."""

    def stats(self) -> EngineStats:
        """How full it is, and what it has done."""
