"""Time of generation: clocks that wait for the device, percentiles, throughput."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


def device_clock(device: torch.device) -> Callable[[], float]:
    """Seconds, read after the device has finished all queued work."""
    if device.type != "cuda":
        return time.perf_counter

    def synchronized() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronized


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Median and 99th percentile (nearest rank); None without any values."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    rank = math.ceil(0.99 * len(ordered)) - 1
    return {"median": statistics.median(ordered), "p99": ordered[rank]}


def request_timing(
    index: int, num_input_tokens: int, seconds_per_token: Sequence[float], memory_bytes: int
) -> dict[str, Any]:
    """One request under the keys of Megatron-LM's performance test; `latency` is its own."""
    latency = sum(seconds_per_token)
    return {
        "id": index,
        "num_input_tokens": num_input_tokens,
        "num_output_tokens": len(seconds_per_token),
        "tpot": list(seconds_per_token),
        "latency": latency,
        "latency_per_output_token": latency / len(seconds_per_token),
        "memory_usage_GB": memory_bytes / 1024**3,
    }


def throughput(
    requests: Sequence[dict[str, Any]], batch_seconds: Sequence[float]
) -> dict[str, Any]:
    """Figures over all requests; `batch_seconds` is the wall time of each batch.

    `latency_per_output_token` is the sum of the latencies of requests over that of their output
    tokens."""
    num_tokens = sum(request["num_output_tokens"] for request in requests)
    later = [seconds for request in requests for seconds in request["tpot"][1:]]
    return {
        "num_requests": len(requests),
        "num_output_tokens": num_tokens,
        "seconds": sum(batch_seconds),
        "tokens_per_second": num_tokens / sum(batch_seconds),
        "time_to_first_token": spread([request["tpot"][0] for request in requests]),
        "inter_token_latency": spread(later),
        "latency_per_output_token": sum(r["latency"] for r in requests) / num_tokens,
    }
