"""Generates from prompts in batches with the static engine, and times it."""

from __future__ import annotations

import logging
import pprint
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from stages.benchmark.config import BenchmarkConfig
from stages.benchmark.prompts import ordinary_tokens
from stages.benchmark.static_report import report_page
from stages.runtime.context import StageRun
from trainyard.errors import ConfigError
from trainyard.inference.decoders import Decoder
from trainyard.inference.kv_cache import kv_dtype_of
from trainyard.inference.load import ModelOnRanks
from trainyard.inference.log_probs import OnToken
from trainyard.inference.measure import request_timing, throughput
from trainyard.inference.on_ranks import model_on_ranks
from trainyard.inference.padded import PaddedDecoder
from trainyard.inference.prompts import chat_tokens, prompt_tokens, read_prompts
from trainyard.inference.request import Completion
from trainyard.inference.static import GenerationResult, check_room, run_requests
from trainyard.inference.texts import TextRequests, build_decoder
from trainyard.logging import printable
from trainyard.models.init import named_generator
from trainyard.models.quantized import quantize_layers
from trainyard.parallel.device import device_name, peak_memory_bytes
from trainyard.parallel.launcher import rank_of_environment
from trainyard.tokenizers.base import Tokenizer

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
WARMUP_TOKENS = 10


def run(config: BenchmarkConfig, stage: StageRun) -> dict[str, Any]:
    """Generate and print; with --output-dir, write the documents and their page."""
    _, world_size, _, _ = rank_of_environment()
    parallel = config.layout.parallel()
    if world_size != parallel.model_ranks:
        raise ConfigError(
            "--tensor-model-parallel-size x --pipeline-model-parallel-size is "
            f"{parallel.model_ranks}, and the number of ranks {world_size}: a benchmark runs one "
            "copy of a model; make them equal (--nproc-per-node)"
        )
    with model_on_ranks(config) as generator:
        groups, device = generator.groups, generator.model.device
        work = Benchmark(config, generator, device, speaks=groups.rank == 0)
        work.warm_up()
        total = config.inference_repeat_n * len(work.prompts)
        with stage.progress(total, "prompts", "generate") as progress, profiled(config, device):
            repetitions = [
                work.generate_all(progress.update) for _ in range(config.inference_repeat_n)
            ]
        if groups.rank > 0:
            return {}
        generations = describe_generations(work, repetitions)
        timings = describe_timings(work, repetitions)
    print_results(generations, timings)
    if stage.output is not None:
        stage.write_json("generations.json", generations)
        stage.write_json("timings.json", timings, volatile=True)
        stage.write_text("report.html", report_page(timings, generations), volatile=True)
    return {key: timings[key] for key in ("tokens_per_second", "latency_per_output_token")}


def profiled(config: BenchmarkConfig, device: torch.device) -> AbstractContextManager[object]:
    """Starts and stops CUDA's profiler around the timed region, if that is asked for."""
    if not config.benchmark_profile:
        return nullcontext()
    if device.type != "cuda":
        raise ConfigError(f"--benchmark-profile is of CUDA, and the device is {device.type}")
    manager: AbstractContextManager[object] = torch.cuda.profiler.profile()
    return manager


class Benchmark:
    """The prompts of a run and the model that continues them."""

    def __init__(
        self,
        config: BenchmarkConfig,
        generator: ModelOnRanks,
        device: torch.device,
        *,
        speaks: bool,
    ) -> None:
        """speaks: whether this rank prints what --stream shows."""
        self.config, self.generator, self.device = config, generator, device
        self.speaks = speaks
        self._decoders: dict[int, Decoder] = {}
        self._kv_dtype = kv_dtype_of(config.engine.kv_cache_dtype)
        if (weights := config.engine.inference_weight_dtype) is not None:
            if generator.config.model_type == "t5":
                raise ConfigError(
                    f"--inference-weight-dtype {weights} is not for a t5; leave it out"
                )
            quantize_layers(generator.model, weights)
        count = config.num_tokens_to_generate
        if config.num_input_tokens is not None:
            sizes = config.inference_max_requests, config.num_input_tokens
            check_room(generator.model, *sizes, count, self._kv_dtype)
        self.requests = TextRequests(
            generator, config.sampling, config.generation, count, ignore_end=config.ignore_eod
        )
        self.texts, self.prompts = prompts_of(config, generator.tokenizer)
        for number, prompt in enumerate(self.prompts):
            self.requests.make(prompt, number, f"prompt {number}")
        config.check_length(max(map(len, self.prompts)))

    def _decoder(self, batch_size: int) -> Decoder:
        """Made once for each size of a batch. A compiled one is made for the first batch, which
        none exceeds, and smaller ones are padded: another would be compiled while time is taken,
        and on a CPU hold the weights once more."""
        compiled = self.config.cuda_graph_impl == "local"
        most = min(self.config.inference_max_requests, len(self.prompts))
        size = most if compiled else batch_size
        if size not in self._decoders:
            longest, count = max(map(len, self.prompts)), self.config.num_tokens_to_generate
            self._decoders[size] = build_decoder(
                *(self.generator, size, longest, count), compiled=compiled, kv_dtype=self._kv_dtype
            )
        decoder = self._decoders[size]
        return decoder if size == batch_size else PaddedDecoder(decoder, size)

    def warm_up(self) -> None:
        """Generate a few tokens of the first batch, so that no timing includes one-time work."""
        for _ in range(self.config.num_warmups):
            self._run_batch(0, WARMUP_TOKENS)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def generate_all(self, on_prompts: Callable[[int], object]) -> list[GenerationResult]:
        """The results of all batches of prompts, in order."""
        results = []
        for first in range(0, len(self.prompts), self.config.inference_max_requests):
            result = self._run_batch(first, None)
            results.append(result)
            on_prompts(len(result.completions))
        return results

    def _run_batch(self, first: int, most: int | None) -> GenerationResult:
        """most: tokens of each prompt, fewer than asked for; None: as asked for."""
        batch = self.prompts[first : first + self.config.inference_max_requests]
        requests = [self.requests.make(p, first + i, "a prompt") for i, p in enumerate(batch)]
        is_warmup = most is not None
        if most is not None:
            requests = [request.shortened(most) for request in requests]
        decoder = self._decoder(len(batch))
        on_token = None
        if self.config.stream and self.speaks and not is_warmup:
            on_token = streamed(self.generator.tokenizer, first)
        return run_requests(decoder, requests, on_token=on_token)


def streamed(tokenizer: Tokenizer, first: int) -> OnToken:
    """Prints the text of the first row as its tokens come. first: number of the row."""
    tokens: list[int] = []
    shown = ""

    def show(row: int, token: int) -> None:
        nonlocal shown
        if row:
            return
        if not tokens:
            print(f"\nprompt {first}: ", end="")
        tokens.append(token)
        text = tokenizer.decode(tokens)
        if not text.endswith("\ufffd"):  # the rest of a character comes with the next token
            print(printable(text.removeprefix(shown)), end="", flush=True)
            shown = text

    return show


def prompts_of(config: BenchmarkConfig, tokenizer: Tokenizer) -> tuple[list[str], list[list[int]]]:
    """The prompts as texts and as token ids: given ones, turns of users, or random ids without
    special tokens."""
    if config.num_input_tokens is not None:
        rows = random_prompts(config, config.num_input_tokens, tokenizer)
        return [tokenizer.decode(row) for row in rows], rows
    prompts = read_prompts(config.prompts, config.prompt_file, config.prompt_key)
    texts = [prompt.text for prompt in prompts]
    if config.chat:
        return texts, [chat_tokens(tokenizer, text) for text in texts]
    add_bos = config.generation.add_bos
    return texts, [prompt_tokens(tokenizer, text, add_bos=add_bos) for text in texts]


def random_prompts(config: BenchmarkConfig, length: int, tokenizer: Tokenizer) -> list[list[int]]:
    """As many as a batch has."""
    ordinary = torch.tensor(ordinary_tokens(tokenizer))
    shape = (config.inference_max_requests, length)
    generator = named_generator("random prompts", config.sampling.seed)
    chosen = torch.randint(len(ordinary), shape, generator=generator)
    rows: list[list[int]] = ordinary[chosen].tolist()
    return rows


# --- documents --------------------------------------------------------------------------------


def describe_generations(
    work: Benchmark, repetitions: Sequence[Sequence[GenerationResult]]
) -> dict[str, Any]:
    """The generated texts: a pure function of checkpoint and options."""
    first = [completion for result in repetitions[0] for completion in result.completions]
    for other in repetitions[1:]:
        if [c.tokens for result in other for c in result.completions] != [c.tokens for c in first]:
            log.warning(
                "repetitions generated different tokens: this device does not round reproducibly"
            )
    sampling = work.config.sampling
    return {
        "format_version": FORMAT_VERSION,
        "step": work.generator.step,
        "sampling": {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        },
        "requests": [_described(work, index, completion) for index, completion in enumerate(first)],
    }


def _described(work: Benchmark, index: int, completion: Completion) -> dict[str, Any]:
    return {
        "id": index,
        "prompt": work.texts[index],
        "generated_output": work.requests.text(completion),
        "finish_reason": completion.finish_reason,
        "prompt_tokens": list(completion.request.prompt),
        "generated_tokens": completion.tokens,
        **work.requests.scores(completion),
    }


def describe_timings(
    work: Benchmark, repetitions: Sequence[Sequence[GenerationResult]]
) -> dict[str, Any]:
    """The times of every request in every repetition, and the figures over all of them."""
    memory = peak_memory_bytes(work.device)
    requests: list[dict[str, Any]] = []
    for results in repetitions:
        seconds = [
            result.seconds_per_token(i) for result in results for i in range(len(result.outputs))
        ]
        for index, (prompt, each) in enumerate(zip(work.prompts, seconds, strict=True)):
            requests.append(request_timing(index, len(prompt), each, memory))
    batches = [sum(result.step_seconds) for results in repetitions for result in results]
    return {
        "format_version": FORMAT_VERSION,
        "step": work.generator.step,
        "engine_type": work.config.engine_type,
        "cuda_graph_impl": work.config.cuda_graph_impl,
        "device": device_name(work.device),
        "num_threads": torch.get_num_threads(),
        **throughput(requests, batches),
        "peak_memory_bytes": memory,
        "kv_cache_bytes": max(result.cache_bytes for result in repetitions[0]),
        "requests": requests,
    }


def print_results(generations: dict[str, Any], timings: dict[str, Any]) -> None:
    """Print the requests of the first repetition as Megatron-LM's test does, then the figures."""
    for request, generation in zip(timings["requests"], generations["requests"], strict=False):
        print(f" \n------------- RESULT FOR PROMPT {request['id']} --------------- ")
        shown = {**request, "tpot": [round(seconds, 6) for seconds in request["tpot"]]}
        shown["generated_output"] = generation["generated_output"]
        pprint.pp(shown, width=100, compact=True)
    print(f"\nThroughput: {timings['tokens_per_second']:.2f} output tokens / second")
    names = {
        "time_to_first_token": "Time to first token",
        "inter_token_latency": "Inter-token latency",
        "time_per_output_token": "Time per output token",
        "end_to_end_latency": "End-to-end latency",
    }
    for key, name in names.items():
        if timings[key] is not None:
            median, p99 = timings[key]["median"] * 1e3, timings[key]["p99"] * 1e3
            print(f"{name}: median {median:.2f} ms, p99 {p99:.2f} ms")
    print(f"Latency per output token: {timings['latency_per_output_token'] * 1e3:.2f} ms")
    print(f"Peak memory: {timings['peak_memory_bytes'] / 1024**3:.3f} GB")
