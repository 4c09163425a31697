"""Generation beside `transformers`, and as a share of a GPU's copy bandwidth.

    python -m benchmarks.inference                   CPU: both in turn, the same weights and prompts
    python -m benchmarks.inference --device cuda     a GPU: Llama-3-8B's shape, bf16
    python -m benchmarks.inference --device cuda --weights fp8
                                                     matrices in 8 bits
    python -m benchmarks.inference --device cuda --weights fp8 --kv-cache-dtype fp8
                                                     keys and values in 8 bits too
    python -m benchmarks.inference --device cuda --shapes mamba-130m hybrid-800m
                                                     presets of recipes/models; no bar

CPU: random weights, fp32, greedy, prompts of 64 tokens, 64 new ones; seconds of the fastest of each
setting's runs, since other work on a machine only adds. Both may use what is faster here: we a
compiled step or a plain one, the peer its dynamic cache or its static one (its `generate` compiles
on accelerators alone). All must make the same tokens.

GPU: 1,024 tokens in, 128 out. Model-bandwidth utilisation is the bytes that a step reads (weights
but the rows of the embedding, keys and values) over its time, as a share of the bytes that a copy
of the device reads and writes in that time. The first token is not counted. A state is read and
written in every step. Memory is the peak of PyTorch's allocator once the step is recorded, beside
weights, keys, values and prompts as `stages.plan` counts them."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch

from benchmarks.corpus import report
from stages.plan.config import PlanConfig
from trainyard.config import from_dict
from trainyard.conversion.loaders import open_source
from trainyard.fp8.weights import E4M3, Kind
from trainyard.inference.decoders import CachedDecoder
from trainyard.inference.measure import device_clock
from trainyard.inference.request import Request
from trainyard.inference.static import GenerationResult, generate, run_requests
from trainyard.models.costs.inference_memory import (
    kv_numbers,
    prompt_numbers,
    rows_at_once,
    state_bytes,
)
from trainyard.models.families import family_of
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.quantized import quantize_layers
from trainyard.parallel.device import default_dtype, device_name

LENGTH, NEW = 64, 64
BAR = 1.2
SHAPES: dict[str, dict[str, Any]] = {
    "quick start": {
        "vocab_size": 4096,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    },
    "125M": {
        "vocab_size": 50304,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
}
"""Llamas, by the names of `transformers`."""

GPU_LENGTH, GPU_NEW = 1024, 128
LLAMA_3_8B: dict[str, Any] = {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "seq_length": 8192,
    "position_embedding_type": "rope",
    "rotary_base": 500000,
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
LLAMA = "Llama-3-8B shape"
VOCABS = {LLAMA: 128256, "mamba-130m": 50288, "hybrid-800m": 256000}
"""Rows of the embedding, by shape: Llama-3-8B's, or a preset."""
GPU_BARS = {1: 0.80}
"""Least share of the copy bandwidth, by batch."""
GPU_RATES = {8: 2 * 809.0, 64: 2.5 * 3194.0}
"""Least output tokens a second, by batch: multiples of what `transformers` reached on an H200."""
FP8_RATES = {1: 360.0, 8: 1.6 * GPU_RATES[8], 64: 1.6 * GPU_RATES[64]}
"""With weights in FP8: 1.6 times the least of bf16."""


def random_prompts(batch: int, length: int, vocab: int) -> list[list[int]]:
    """Token ids."""
    generator = torch.Generator().manual_seed(batch)
    rows: list[list[int]] = torch.randint(2, vocab, (batch, length), generator=generator).tolist()
    return rows


# --- CPU, beside transformers -----------------------------------------------------------------


def on_cpu(names: Sequence[str], batches: Sequence[int], runs: int) -> None:
    """A row for each model and batch."""
    for name in names:
        with TemporaryDirectory() as folder:
            theirs = their_model(SHAPES[name], Path(folder))
            ours = our_model(folder)
        for batch in batches:
            prompts = random_prompts(batch, LENGTH, ours.vocab_size)
            compare(f"{name}, batch {batch}, fp32", ours, theirs, prompts, runs)


def their_model(shape: dict[str, Any], folder: Path) -> Any:
    """A Llama of `transformers` with random weights, saved in a folder."""
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(**shape, bos_token_id=1, eos_token_id=0)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def our_model(folder: str) -> GPTModel:
    """The same, by our reader."""
    with open_source(folder, "hf") as source:
        assert isinstance(source.config, GPTConfig)
        model = GPTModel(source.config, source.padded_vocab_size)
        names = model.state_dict().keys()
        model.load_state_dict({name: source.read(f"model.{name}") for name in names})
    return model.eval().requires_grad_(False)


def compare(name: str, ours: GPTModel, theirs: Any, prompts: list[list[int]], runs: int) -> None:
    """Run both in turn and report a row."""
    tensor = torch.tensor(prompts)

    def peer(cache: str | None) -> Callable[[], list[list[int]]]:
        options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
        options |= {"eos_token_id": None, "pad_token_id": 0, "cache_implementation": cache}

        def run() -> list[list[int]]:
            mask = torch.ones_like(tensor)
            made = theirs.generate(tensor, attention_mask=mask, **options)
            rows: list[list[int]] = made[:, LENGTH:].tolist()
            return rows

        return run

    decoder = CachedDecoder(ours, len(prompts), LENGTH + NEW, compiled=True)
    requests = [Request(prompt=p, max_tokens=NEW, number=i) for i, p in enumerate(prompts)]
    settings: dict[str, Callable[[], list[list[int]]]] = {
        "ours": lambda: generate(ours, prompts, NEW).outputs,
        "ours compiled": lambda: run_requests(decoder, requests).outputs,
        "dynamic cache": peer(None),
        "static cache": peer("static"),
    }
    seconds: dict[str, list[float]] = {key: [] for key in settings}
    made = {}
    for _ in range(runs + 1):  # the first warms up
        for key, run in settings.items():
            began = time.perf_counter()
            made[key] = run()
            seconds[key].append(time.perf_counter() - began)
    assert all(rows == made["ours"] for rows in made.values()), "other tokens"
    best = {key: min(values[1:]) for key, values in seconds.items()}
    rates = {key: len(prompts) * NEW / value for key, value in best.items()}
    mine = max(rates["ours"], rates["ours compiled"])
    ratio = mine / max(rates["dynamic cache"], rates["static cache"])
    reached = ", ".join(f"{key} {rate:,.0f}" for key, rate in rates.items())
    report(name, f"{reached} tok/s: {ratio:.2f}x", f"{BAR}x", ratio >= BAR)


# --- a GPU ------------------------------------------------------------------------------------


def on_gpu(
    shapes: Sequence[str],
    batches: Sequence[int],
    graphs: Sequence[str],
    runs: int,
    weights: str,
    kv_dtype: torch.dtype,
) -> None:
    """A row for each shape, batch, and step as a CUDA graph or not."""
    device = torch.device("cuda")
    bandwidth = copy_bandwidth(device)
    print(f"{device_name(device)}, torch {torch.__version__}: copy {bandwidth / 1e12:.2f} TB/s")
    for name in shapes:
        is_llama = name == LLAMA
        config = GPTConfig(**LLAMA_3_8B) if is_llama else preset(name)
        model = random_model(config, VOCABS[name], device, torch.bfloat16)
        if weights != "bf16":
            quantize_layers(model, cast(Kind, weights))
        bars = {"bf16": GPU_RATES, "fp8": FP8_RATES}.get(weights, {}) if is_llama else {}
        kind = f"{name}, {weights}" + ("" if kv_dtype == torch.bfloat16 else ", FP8 cache")
        for_shape(kind, model, batches, graphs, runs, bandwidth, kv_dtype, bars)


def preset(name: str) -> GPTConfig:
    """The model of a preset in recipes/models."""
    path = Path(__file__).parents[1] / "recipes" / "models" / f"{name}.toml"
    config = from_dict(PlanConfig, tomllib.loads(path.read_text()) | {"vocab_size": 1}, name).model
    assert isinstance(config, GPTConfig)
    return config


def for_shape(
    shape: str,
    model: GPTModel,
    batches: Sequence[int],
    graphs: Sequence[str],
    runs: int,
    bandwidth: float,
    kv_dtype: torch.dtype,
    bars: Mapping[int, float],
) -> None:
    """The rows of a model. bars: least tokens a second, by batch."""
    config, table = model.config, model.embedding
    assert table is not None
    read = held = weight_bytes(model)
    if config.untie_embeddings_and_output_weights:
        read -= sum(p.numel() * p.element_size() for p in table.parameters())
    layers = range(config.num_layers)
    of_token, state = kv_numbers(config, layers), state_bytes(config, layers, 1, 2)
    of_token *= kv_dtype.itemsize
    for batch in batches:
        for graph in graphs:
            result = timed(model, batch, runs, kv_dtype, graphs=graph == "on")
            step = statistics.median(result.step_seconds[1:])
            kept = batch * ((GPU_LENGTH + GPU_NEW / 2) * of_token + 2 * state)
            share = (read + kept) / step / bandwidth
            rate = batch / step
            planned = held + batch * ((GPU_LENGTH + GPU_NEW) * of_token + state)
            at_once = rows_at_once(batch, GPU_LENGTH) * GPU_LENGTH
            planned += at_once * prompt_numbers(config, 1) * 2
            peak = torch.cuda.max_memory_allocated()
            reached = (
                f"TPOT {step * 1e3:.2f} ms, {rate:,.0f} tok/s, {100 * share:.1f} % of the copy "
                f"bandwidth, first token {result.step_seconds[0] * 1e3:.1f} ms, memory "
                f"{peak / 1e9:.2f} GB, planned {planned / 1e9:.2f} ({100 * planned / peak:.1f} %)"
            )
            name = f"{shape}, batch {batch}, CUDA graph {graph}"
            least = GPU_BARS.get(batch, 0.0) if bars is GPU_RATES else 0.0
            fastest = bars.get(batch, 0.0)
            bar = f"{100 * least:.0f} %" if least else f"{fastest:,.0f} tok/s"
            report(name, reached, bar, share >= least and rate >= fastest)


def weight_bytes(model: GPTModel) -> int:
    """Of all matrices, those of 8 bits with their scales."""
    tensors = list(model.parameters())
    for module in model.modules():
        quantized = getattr(module, "quantized", None)
        if quantized is not None:
            tensors += [quantized.values, quantized.scale]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def random_model(
    config: GPTConfig, vocab: int, device: torch.device, dtype: torch.dtype
) -> GPTModel:
    """A GPT or a Mamba with random weights."""
    with device, default_dtype(dtype), torch.no_grad():
        model: GPTModel = family_of(config).load_class()(config, vocab)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02)
    return model.eval().requires_grad_(False)


def timed(
    model: GPTModel, batch: int, runs: int, kv_dtype: torch.dtype, *, graphs: bool
) -> GenerationResult:
    """The run with the fastest step in the median, after one that compiles and records."""
    prompts = random_prompts(batch, GPU_LENGTH, model.vocab_size)
    requests = [Request(prompt=p, max_tokens=GPU_NEW, number=i) for i, p in enumerate(prompts)]
    decoder = CachedDecoder(model, batch, GPU_LENGTH + GPU_NEW, compiled=graphs, kv_dtype=kv_dtype)
    run_requests(decoder, requests)
    gc.collect()  # the decoder of the row before
    torch.cuda.reset_peak_memory_stats()
    results = [run_requests(decoder, requests) for _ in range(runs)]
    return min(results, key=lambda result: statistics.median(result.step_seconds[1:]))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a copy of 4 GiB."""
    source = torch.empty(2**31, dtype=torch.bfloat16, device=device)
    target, clock = torch.empty_like(source), device_clock(device)
    seconds = []
    for _ in range(10):
        began = clock()
        target.copy_(source)
        seconds.append(clock() - began)
    return 2 * source.numel() * source.element_size() / min(seconds)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument(
        "--shapes", nargs="+", choices=tuple(VOCABS), default=[LLAMA], help="on a GPU"
    )
    parser.add_argument("--weights", choices=("bf16", "int8", "fp8"), default="bf16")
    parser.add_argument("--kv-cache-dtype", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument(
        "--graphs", nargs="+", choices=("on", "off"), default=["on", "off"], help="CUDA graphs"
    )
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of the CPU")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        batches = arguments.batches or [1, 8, 64]
        kv_dtype = E4M3 if arguments.kv_cache_dtype == "fp8" else torch.bfloat16
        of_run = (batches, arguments.graphs, arguments.runs, arguments.weights, kv_dtype)
        on_gpu(arguments.shapes, *of_run)
    else:
        torch.set_num_threads(arguments.threads)
        on_cpu(arguments.models, arguments.batches or [1, 8], arguments.runs)


if __name__ == "__main__":
    main()
