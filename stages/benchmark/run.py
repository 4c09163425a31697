"""Generates from prompts in batches with the static engine, and times it."""

from __future__ import annotations

import logging
import pprint
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from stages.benchmark.config import BenchmarkConfig
from stages.runtime.context import StageRun
from trainyard.checkpoint.model import WRITERS, LoadedModel, load_model
from trainyard.errors import ConfigError
from trainyard.inference.measure import device_clock, request_timing, throughput
from trainyard.inference.static import GenerationResult, check_lengths, check_room, generate
from trainyard.models.init import named_generator
from trainyard.parallel.device import device_name, peak_memory_bytes, resolve_device
from trainyard.tokenizers.base import Tokenizer

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
WARMUP_TOKENS = 10


def run(config: BenchmarkConfig, stage: StageRun) -> dict[str, Any]:
    """Generate and print; with --output-dir, write the two documents."""
    device = resolve_device(config.device)
    loaded = load_model(config.load, device=str(device), model_type=WRITERS)
    loaded.model.eval()
    if config.bf16 or config.fp16:
        loaded.model.to(torch.bfloat16 if config.bf16 else torch.float16)
    if config.num_input_tokens is not None:
        sizes = config.inference_max_requests, config.num_input_tokens
        check_room(loaded.model, *sizes, config.num_tokens_to_generate)
    prompts = prompt_tokens(config, loaded.tokenizer)
    check_lengths(loaded.model, prompts, config.num_tokens_to_generate)
    config.check_length(max(map(len, prompts)))
    warm_up(config, loaded, prompts, device)
    repetitions = []
    with (
        stage.progress(config.inference_repeat_n * len(prompts), "prompts", "generate") as progress,
        profiled(config, device),
    ):
        for _ in range(config.inference_repeat_n):
            repetitions.append(generate_all(config, loaded, prompts, device, progress.update))
    generations = describe_generations(config, loaded, prompts, repetitions)
    timings = describe_timings(loaded, prompts, repetitions, device)
    print_results(generations, timings)
    if stage.output is not None:
        stage.write_json("generations.json", generations)
        stage.write_json("timings.json", timings, volatile=True)
    return {key: timings[key] for key in ("tokens_per_second", "latency_per_output_token")}


def prompt_tokens(config: BenchmarkConfig, tokenizer: Tokenizer) -> list[list[int]]:
    """The prompts as token ids: encoded texts, turns of users, or random ids without special
    tokens."""
    if config.chat:
        return [chat_prompt(text, tokenizer) for text in config.prompts]
    if config.num_input_tokens is None:
        return [tokenizer.encode(text) for text in config.prompts]
    special = {tokenizer.eod, tokenizer.pad}
    ordinary = torch.tensor([i for i in range(tokenizer.vocab_size) if i not in special])
    if not len(ordinary):
        raise ConfigError("--num-input-tokens: the tokenizer has only special tokens")
    shape = (config.inference_max_requests, config.num_input_tokens)
    generator = named_generator("random prompts", config.sampling.seed)
    rows: list[list[int]] = ordinary[
        torch.randint(len(ordinary), shape, generator=generator)
    ].tolist()
    return rows


def chat_prompt(text: str, tokenizer: Any) -> list[int]:
    """A conversation of one user's turn, and what invites the model to answer it."""
    lay_out = getattr(tokenizer, "tokenize_conversation", None)
    if lay_out is None:
        raise ConfigError(
            f"--chat: the checkpoint's tokenizer ({tokenizer.config.tokenizer_type}) has no format "
            "of conversations, so the model was not tuned on any; leave it out"
        )
    turns = [{"role": "user", "content": text}]
    ids: list[int] = lay_out(turns, return_target=False, add_generation_prompt=True).tolist()
    return ids


def warm_up(
    config: BenchmarkConfig, loaded: LoadedModel, prompts: Sequence[list[int]], device: torch.device
) -> None:
    """Generate a few tokens of the first batch, so that no timing includes one-time work."""
    batch = prompts[: config.inference_max_requests]
    for _ in range(config.num_warmups):
        generate(loaded.model, batch, min(WARMUP_TOKENS, config.num_tokens_to_generate))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def profiled(config: BenchmarkConfig, device: torch.device) -> AbstractContextManager[object]:
    """Starts and stops CUDA's profiler around the timed region, if that is asked for."""
    if not config.benchmark_profile:
        return nullcontext()
    if device.type != "cuda":
        raise ConfigError(f"--benchmark-profile is of CUDA, and the device is {device.type}")
    manager: AbstractContextManager[object] = torch.cuda.profiler.profile()
    return manager


def generate_all(
    config: BenchmarkConfig,
    loaded: LoadedModel,
    prompts: Sequence[list[int]],
    device: torch.device,
    on_prompts: Any,
) -> list[GenerationResult]:
    """The results of all batches of prompts, in order."""
    results = []
    for first in range(0, len(prompts), config.inference_max_requests):
        batch = prompts[first : first + config.inference_max_requests]
        results.append(
            generate(
                loaded.model,
                batch,
                config.num_tokens_to_generate,
                sampling=config.sampling,
                eod=None if config.ignore_eod else loaded.tokenizer.eod,
                vocab_size=loaded.tokenizer.vocab_size,
                first_request=first,
                clock=device_clock(device),
            )
        )
        on_prompts(len(batch))
    return results


# --- documents --------------------------------------------------------------------------------


def describe_generations(
    config: BenchmarkConfig,
    loaded: LoadedModel,
    prompts: Sequence[list[int]],
    repetitions: Sequence[Sequence[GenerationResult]],
) -> dict[str, Any]:
    """The generated texts: a pure function of checkpoint and options."""
    outputs = [output for result in repetitions[0] for output in result.outputs]
    stopped = [flag for result in repetitions[0] for flag in result.stopped]
    for other in repetitions[1:]:
        if [output for result in other for output in result.outputs] != outputs:
            log.warning(
                "repetitions generated different tokens: this device does not round reproducibly"
            )
    decode = loaded.tokenizer.decode
    return {
        "format_version": FORMAT_VERSION,
        "step": loaded.step,
        "sampling": {
            "temperature": config.sampling.temperature,
            "top_k": config.sampling.top_k,
            "top_p": config.sampling.top_p,
            "seed": config.sampling.seed,
        },
        "requests": [
            {
                "id": index,
                "prompt": config.prompts[index] if config.prompts else decode(prompt),
                "generated_output": decode(outputs[index]),
                "finish_reason": "stop" if stopped[index] else "length",
                "prompt_tokens": list(prompt),
                "generated_tokens": outputs[index],
            }
            for index, prompt in enumerate(prompts)
        ],
    }


def describe_timings(
    loaded: LoadedModel,
    prompts: Sequence[list[int]],
    repetitions: Sequence[Sequence[GenerationResult]],
    device: torch.device,
) -> dict[str, Any]:
    """The times of every request in every repetition, and the figures over all of them."""
    memory = peak_memory_bytes(device)
    requests: list[dict[str, Any]] = []
    for results in repetitions:
        seconds = [
            result.seconds_per_token(i) for result in results for i in range(len(result.outputs))
        ]
        for index, (prompt, each) in enumerate(zip(prompts, seconds, strict=True)):
            requests.append(request_timing(index, len(prompt), each, memory))
    batches = [sum(result.step_seconds) for results in repetitions for result in results]
    return {
        "format_version": FORMAT_VERSION,
        "step": loaded.step,
        "device": device_name(device),
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
    }
    for key, name in names.items():
        if timings[key] is not None:
            median, p99 = timings[key]["median"] * 1e3, timings[key]["p99"] * 1e3
            print(f"{name}: median {median:.2f} ms, p99 {p99:.2f} ms")
    print(f"Latency per output token: {timings['latency_per_output_token'] * 1e3:.2f} ms")
    print(f"Peak memory: {timings['peak_memory_bytes'] / 1024**3:.3f} GB")
