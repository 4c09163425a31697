"""Time of generation: clocks that wait for the device, percentiles, throughput.

Latencies have the definitions of vLLM's and AIPerf's benchmarks: time to first token; end-to-end
latency, until a request's own last token; time per output token, (end-to-end - first) / (n - 1) of
a request with n > 1 tokens; inter-token latency, the gaps of all requests pooled. Megatron-LM's
"TPOT" is total latency over output tokens: `latency_per_output_token`."""

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
    """Mean, median and 99th percentile (nearest rank); None without any values."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    rank = math.ceil(0.99 * len(ordered)) - 1
    return {
        "mean": statistics.fmean(ordered),
        "median": statistics.median(ordered),
        "p99": ordered[rank],
    }


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
    per_token = [
        sum(request["tpot"][1:]) / (request["num_output_tokens"] - 1)
        for request in requests
        if request["num_output_tokens"] > 1
    ]
    return {
        "num_requests": len(requests),
        "num_output_tokens": num_tokens,
        "seconds": sum(batch_seconds),
        "tokens_per_second": num_tokens / sum(batch_seconds),
        "time_to_first_token": spread([request["tpot"][0] for request in requests]),
        "inter_token_latency": spread(later),
        "time_per_output_token": spread(per_token),
        "end_to_end_latency": spread([request["latency"] for request in requests]),
        "latency_per_output_token": sum(r["latency"] for r in requests) / num_tokens,
    }
