"""The dynamic engine in process, on a GPU with Llama-3-8B's shape in bf16 and random weights.

    python -m benchmarks.serving                            an H200
    python -m benchmarks.serving --device cpu               a tiny model, to try the program

- throughput: 256 requests at a time of 1,000 tokens in and 1,000 out, all queued at the start;
  output tokens over the time of all of them. A share of the 17,744 tokens/s that TensorRT-LLM
  publishes for Llama-3.1-8B in FP8 on this GPU.
- mixed: prompts and outputs of 128 to 2,048 tokens (even over the logarithm), beside the static
  engine with batches of the requests in their order, its step compiled and recorded too.
- prefix: 64 requests that share their first 2,000 tokens, of which the cache knows the shared ones
  or keeps nothing; mean time to the first token, after as many requests that share other tokens.

On a GPU, compiling and recording the graphs takes a minute or more, and 512 requests of 1,000
tokens over another one. What is done is said on standard error as it goes. A part ends after
--seconds-per-part: its row is then of the tokens that were made by then, and says so."""

from __future__ import annotations

import argparse
import gc
import logging
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from benchmarks.corpus import report
from benchmarks.inference import LLAMA, LLAMA_3_8B, VOCABS, random_model
from trainyard.inference.decoders import CachedDecoder
from trainyard.inference.dynamic.build import engine_of
from trainyard.inference.dynamic.config import DynamicConfig
from trainyard.inference.dynamic.engine import DynamicEngine
from trainyard.inference.measure import device_clock
from trainyard.inference.request import Request
from trainyard.inference.static import run_requests
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.quantized import quantize_layers
from trainyard.parallel.device import GIBIBYTE, device_name, peak_memory_bytes

BEGAN = time.monotonic()
SAY_SECONDS = 5.0

TRT_LLM = 17_744.0
"""Output tokens/s, 1,000 in and 1,000 out, as published."""
BARS = {"throughput": 0.5 * TRT_LLM, "mixed": 2.5, "prefix": 5.0}


class Sizes(NamedTuple):
    """Of the workloads."""

    concurrent: int
    num_requests: int
    length: int
    new: int
    mixed: tuple[int, int]
    num_mixed: int
    static_batch: int
    shared: int
    sharing: int


GPU = Sizes(256, 512, 1000, 1000, (128, 2048), 128, 64, 2000, 64)
CPU = Sizes(8, 16, 20, 10, (8, 48), 12, 4, 64, 8)
TINY = LLAMA_3_8B | {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "seq_length": 256,
}


@dataclass(slots=True)
class Times:
    """Of a run, in seconds from its start."""

    first: dict[int, float] = field(default_factory=dict)
    """First token of each request."""
    total: float = 0.0
    num_tokens: int = 0
    steps: int = 0
    was_cut: bool = False
    """Whether the time was over before the requests had ended."""


def say(text: str) -> None:
    """A line of progress, with the seconds since the program began."""
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", file=sys.stderr, flush=True)


def drive(
    engine: DynamicEngine,
    requests: Sequence[Request],
    device: torch.device,
    what: str,
    limit_seconds: float = math.inf,
) -> Times:
    """Queue all requests, and run them to their ends, or for so long."""
    clock, times, said = device_clock(device), Times(), 0.0
    total = sum(request.max_tokens for request in requests)
    say(f"{what}: {len(requests)} requests, {total:,} new tokens")
    began = clock()
    numbers = [engine.add(request) for request in requests]
    while engine.has_work():
        updates = engine.step()
        now = clock() - began
        times.steps += 1
        if now - said > SAY_SECONDS:
            said = now
            say(f"{what}: {times.num_tokens:,} tokens in {now:.0f} s, {times.steps} steps")
        if now > limit_seconds:
            times.was_cut = True
            for number in numbers:
                engine.cancel(number)
        for update in updates:
            times.first.setdefault(update.number, now)
            times.num_tokens += update.num_new
    times.total = clock() - began
    return times


def request_of(
    length: int, new: int, vocab: int, number: int, before: Sequence[int] = ()
) -> Request:
    """A request of random tokens behind others that it shares."""
    draw = random.Random(number)
    prompt = [*before, *(draw.randrange(2, vocab) for _ in range(length))]
    return Request(prompt=prompt, max_tokens=new, number=number)


def build(model: GPTModel, sizes: Sizes, most: int, graphs: int, **options: Any) -> DynamicEngine:
    """An engine for requests of up to `most` tokens, warmed up by some."""
    config = DynamicConfig(
        inference_dynamic_batching_max_requests=sizes.concurrent,
        inference_dynamic_batching_num_cuda_graphs=graphs,
        **options,
    )
    say(f"an engine with {graphs} CUDA graphs")
    engine = engine_of(model, config, max_seq_length=most)
    assert isinstance(engine, DynamicEngine)
    warm = [request_of(most // 2, 4, model.vocab_size, 10_000 + i) for i in range(4)]
    drive(engine, warm, model.device, "warm-up")
    return engine


def throughput(engine: DynamicEngine, model: GPTModel, sizes: Sizes, limit: float) -> None:
    """Output tokens a second at full load."""
    requests = [
        request_of(sizes.length, sizes.new, model.vocab_size, i) for i in range(sizes.num_requests)
    ]
    times = drive(engine, requests, model.device, "throughput", limit)
    stats = engine.stats()
    rate = times.num_tokens / times.total
    kept = list(model.parameters())
    for module in model.modules():
        if quantized := getattr(module, "quantized", None):
            kept += [quantized.values, quantized.scale]
    weights = sum(p.numel() * p.element_size() for p in kept)
    reached = (
        f"{rate:,.0f} output tok/s ({rate / TRT_LLM:.2f}x TensorRT-LLM's), {times.steps} steps, "
        f"{times.total:.1f} s, weights {weights / GIBIBYTE:.1f} GiB, {stats.blocks_total} blocks, "
        f"peak {peak_memory_bytes(model.device) / GIBIBYTE:.1f} GiB, {stats.preemptions} preempted"
        f"{_cut(times.was_cut)}"
    )
    name = f"throughput, {sizes.concurrent} concurrent, {sizes.length} in / {sizes.new} out"
    report(name, reached, f"{BARS['throughput']:,.0f} tok/s", rate >= BARS["throughput"])


def mixed_requests(sizes: Sizes, vocab: int) -> list[Request]:
    """Of lengths even over their logarithms."""
    draw, (least, most) = random.Random(1), sizes.mixed

    def length() -> int:
        return round(math.exp(draw.uniform(math.log(least), math.log(most))))

    return [request_of(length(), length(), vocab, i) for i in range(sizes.num_mixed)]


def _cut(was_cut: bool) -> str:
    return ", cut by --seconds-per-part" if was_cut else ""


def static_rate(
    model: GPTModel, requests: Sequence[Request], size: int, limit_seconds: float
) -> tuple[float, bool]:
    """Output tokens a second of batches of requests in their order, and whether the time was over
    before the last one. On a GPU the step is compiled and recorded before."""
    clock, seconds, tokens = device_clock(model.device), 0.0, 0
    room = max(len(r.prompt) for r in requests) + max(r.max_tokens for r in requests)
    decoder = CachedDecoder(model, size, room, compiled=model.device.type == "cuda")
    run_requests(decoder, [request_of(8, 4, model.vocab_size, i) for i in range(size)])
    for begin in range(0, len(requests), size):
        batch = requests[begin : begin + size]
        began = clock()
        tokens += sum(map(len, run_requests(decoder, batch).outputs))
        seconds += clock() - began
        say(f"mixed, static: {begin + len(batch)} of {len(requests)} requests in {seconds:.0f} s")
        if seconds > limit_seconds:
            return tokens / seconds, begin + size < len(requests)
    return tokens / seconds, False


def under_load(
    model: GPTModel, sizes: Sizes, graphs: int, parts: Sequence[str], limit: float
) -> None:
    """What one engine measures: full load, and many lengths beside the static engine."""
    engine = build(model, sizes, 2 * sizes.mixed[1], graphs)
    if "throughput" in parts:
        throughput(engine, model, sizes, limit)
    if "mixed" not in parts:
        return
    requests = mixed_requests(sizes, model.vocab_size)
    times = drive(engine, requests, model.device, "mixed, dynamic", limit)
    rate = times.num_tokens / times.total
    del engine
    _empty(model.device)
    other, was_cut = static_rate(model, requests, sizes.static_batch, limit)
    name = "mixed, {} to {} in and out, {} requests".format(*sizes.mixed, len(requests))
    reached = f"dynamic {rate:,.0f}, static {other:,.0f} output tok/s: {rate / other:.2f}x"
    reached += _cut(times.was_cut or was_cut)
    report(name, reached, f"{BARS['mixed']}x", rate / other >= BARS["mixed"])


def prefix(model: GPTModel, sizes: Sizes) -> None:
    """Time to the first token with and without what the cache knows."""

    def sharing(number: int) -> tuple[list[Request], list[Request]]:
        """A request that makes the shared tokens known, and those that share them."""
        vocab = model.vocab_size
        before = request_of(sizes.shared, 1, vocab, number).prompt
        known = [request_of(1, 1, vocab, number + 1, before)]
        return known, [request_of(16, 8, vocab, number + i, before) for i in range(sizes.sharing)]

    means = {}
    for off in (False, True):
        size = 16 if model.device.type == "cpu" else 256
        engine = build(
            model,
            sizes,
            sizes.shared + 32,
            0,
            disable_prefix_caching=off,
            inference_dynamic_batching_block_size=size,
        )
        name = f"prefix, cache {'off' if off else 'on'}"
        for number in (1_000, 2_000):  # the first of them warms up the kernels of these lengths
            known, requests = sharing(number)
            drive(engine, known, model.device, f"{name}, the shared tokens")
            times = drive(engine, requests, model.device, name)
        means[off] = statistics.fmean(times.first.values())
        del engine
        _empty(model.device)
    ratio = means[True] / means[False]
    reached = (
        f"first token after {means[False] * 1e3:.1f} ms, without the cache "
        f"{means[True] * 1e3:.1f} ms: {ratio:.1f}x"
    )
    name = f"prefix, {sizes.shared} shared tokens, {sizes.sharing} requests"
    report(name, reached, f"{BARS['prefix']}x", ratio >= BARS["prefix"])


def _empty(device: torch.device) -> None:
    gc.collect()  # an engine is in cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=tuple(BARS), default=list(BARS))
    parser.add_argument("--weights", choices=("int8", "fp8"), help="of the layers; unset: bf16")
    parser.add_argument("--graphs", type=int, default=16, help="CUDA graphs; 0: none")
    parser.add_argument(
        "--seconds-per-part", type=float, default=120.0, help="of measuring, at most"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    device = torch.device(arguments.device)
    say("the model")
    if device.type == "cuda":
        print(f"{device_name(device)}, torch {torch.__version__}")
        config, vocab = GPTConfig(**LLAMA_3_8B), VOCABS[LLAMA]
        model, sizes = random_model(config, vocab, device, torch.bfloat16), GPU
    else:
        model, sizes = random_model(GPTConfig(**TINY), 512, device, torch.float32), CPU
    if arguments.weights is not None:
        quantize_layers(model, arguments.weights)
    # Compiled layers keep an engine's cache, which takes most of the memory: so that comes last.
    if "prefix" in arguments.parts:
        prefix(model, sizes)
    if {"throughput", "mixed"} & set(arguments.parts):
        limit = arguments.seconds_per_part
        under_load(model, sizes, arguments.graphs, arguments.parts, limit)


if __name__ == "__main__":
    main()
