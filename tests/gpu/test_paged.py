"""The kernel of paged attention and the flash-attn package, where one is installed, against torch,
and the dynamic engine with it and CUDA graphs.

python -m pytest -m gpu tests/gpu/test_paged.py"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.trainyard.attention.paged_cases import CASES, Case, inputs_of
from tests.trainyard.inference.dynamic.engines import build_engine, requests_of, run_all
from tests.trainyard.inference.small_models import (
    LATENTS,
    LLAMA,
    MORE_GPTS,
    SIZES,
    VOCAB,
    decoder_of,
    some_prompts,
)
from trainyard.attention.paged import gathered_attention, paged_attention
from trainyard.attention.paged_flash import BlockNeeds, problem_of_blocks
from trainyard.attention.select import probe_device
from trainyard.fp8.weights import E4M3, Kind, quantize, quantized_linear
from trainyard.inference.config import SamplingConfig
from trainyard.inference.decoders import CachedDecoder
from trainyard.inference.static import run_requests
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import init_parameters
from trainyard.testing.tolerances import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MORE: dict[str, Case] = {
    "many": Case(
        (1,) * 256, tuple(range(1, 513, 2)), 32, 8, width=128, value_width=128, block_size=256
    ),
    "long": Case((1,), (20_000,), 32, 8, width=128, value_width=128, block_size=256),
    "long prefill": Case((3000, 1, 1), (5000, 9, 800), 32, 8, 128, 128, 256),
    "wide": Case((1, 40), (300, 40), 8, 8, width=256, value_width=256),
    "packed": Case((64,) * 7, (64,) * 7, 16, 16, width=64, value_width=64),
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "window": LLAMA | {"window_size": "5,0"},
    "sinks": LLAMA | {"softmax_type": "learnable", "window_size": "5,0"},
}
SMOOTH = LLAMA | {"init_method_std": 0.05}
"""At the 0.2 of the others, a last bit of bf16 that turns a rounding to FP8 moves a log-probability
by up to 0.7; here by 0.06."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Each engine compiles its step anew, and the compiler stops after some."""
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [*CASES.values(), *MORE.values()], ids=[*CASES, *MORE])
def test_the_kernel_widens_keys_of_8_bits_as_torch_does(case: Case, dtype: torch.dtype) -> None:
    q, keys, values, *rest = inputs_of(case, "cuda", dtype)
    keys, values = (x.to(E4M3) for x in (keys, values))
    found = paged_attention(q, keys, values, *rest)
    exact = paged_attention(q, keys.to(dtype), values.to(dtype), *rest)
    assert relative_error(found.float(), exact.float()) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [*CASES.values(), *MORE.values()], ids=[*CASES, *MORE])
def test_the_kernel_attends_as_torch_does(case: Case, dtype: torch.dtype) -> None:
    inputs = inputs_of(case, "cuda", dtype)
    q, keys, values, layout, softmax, window = inputs
    found = paged_attention(*inputs)
    exact = gathered_attention(
        *(x.float() for x in (q, keys, values)),
        (layout.tables, layout.starts, layout.lengths),
        softmax if softmax.sink is None else softmax._replace(sink=softmax.sink.float()),
        -1 if window is None else window[0],
    )
    if dtype == torch.float32:
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)
    else:
        assert relative_error(found.float(), exact) < (1e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [*CASES.values(), *MORE.values()], ids=[*CASES, *MORE])
def test_the_flash_attn_package_attends_as_torch_does(case: Case, dtype: torch.dtype) -> None:
    device = probe_device("cuda")
    case = case._replace(block_size=256) if device.flash_attn == 2 else case
    name = str(dtype).removeprefix("torch.")
    sizes = (case.block_size, case.width, case.value_width)
    if problem := problem_of_blocks(device, BlockNeeds(name, name, *sizes, sink=case.sink)):
        pytest.skip(problem)
    inputs = inputs_of(case, "cuda", dtype)
    q, keys, values, layout, softmax, window = inputs
    exact = gathered_attention(
        *(x.float() for x in (q, keys, values)),
        (layout.tables, layout.starts, layout.lengths),
        softmax if softmax.sink is None else softmax._replace(sink=softmax.sink.float()),
        -1 if window is None else window[0],
    )
    found = paged_attention(*inputs, device.flash_attn)
    assert relative_error(found.float(), exact) < (1e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("graphs", [0, 2], ids=["eager", "graphs"])
def test_an_engine_with_the_flash_attn_package_scores_as_one_without(graphs: int) -> None:
    """By the second token, the first of a step of one token each."""
    if not probe_device("cuda").flash_attn:
        pytest.skip("no flash-attn is installed that this device can run")
    model, prompts = model_of(SMOOTH, torch.bfloat16), some_prompts(3, 17, 9, 12, 5)
    scores: list[torch.Tensor] = []
    for asked in (None, "flash"):
        engine = build_engine(
            model,
            block_size=256,
            num_blocks=16,
            inference_attention_backend=asked,
            inference_dynamic_batching_num_cuda_graphs=graphs,
        )
        requests = [replace(r, log_probs=True) for r in requests_of(prompts, 12)]
        scores.append(torch.tensor([c.log_probs[1] for c in run_all(engine, requests)]))
    torch.testing.assert_close(scores[0], scores[1], rtol=5e-2, atol=0.1)


def model_of(options: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    config = GPTConfig(**(SIZES | {"hidden_size": 128, "kv_channels": 32} | options))
    model = GPTModel(config, VOCAB)
    init_parameters(model, 3)
    return model.eval().to("cuda", dtype)


@pytest.mark.parametrize("graphs", [0, 2], ids=["eager", "graphs"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_makes_the_static_texts_on_a_gpu(kind: str, graphs: int) -> None:
    model, prompts = model_of(KINDS[kind]), some_prompts(3, 17, 9, 12, 5)
    sampled = {"sampling": SamplingConfig(top_k=0, temperature=1.3), "log_probs": True}
    for options in ({}, sampled):
        requests = requests_of(prompts, 12, **options)
        expected = run_requests(decoder_of(model, prompts, 12), requests).completions
        engine = build_engine(
            model,
            block_size=16,
            num_blocks=64,
            max_requests=9,
            max_tokens=32,
            inference_dynamic_batching_num_cuda_graphs=graphs,
        )
        for one, other in zip(run_all(engine, requests, arrive_every=2), expected, strict=True):
            assert one.tokens == other.tokens
            torch.testing.assert_close(
                torch.tensor(one.log_probs), torch.tensor(other.log_probs), rtol=1e-3, atol=1e-4
            )


@pytest.mark.parametrize("graphs", [0, 2], ids=["eager", "graphs"])
def test_keys_of_8_bits_give_the_texts_of_the_static_engine_on_a_gpu(graphs: int) -> None:
    model, prompts = model_of(LLAMA), some_prompts(3, 17, 9, 12, 5)
    requests = requests_of(prompts, 12)
    decoder = CachedDecoder(model, len(prompts), 29, kv_dtype=E4M3)
    expected = run_requests(decoder, requests).outputs
    engine = build_engine(
        model,
        block_size=16,
        max_requests=9,
        max_tokens=32,
        kv_cache_dtype="fp8",
        inference_dynamic_batching_num_cuda_graphs=graphs,
    )
    assert [c.tokens for c in run_all(engine, requests, arrive_every=2)] == expected


@pytest.mark.parametrize("options", [LATENTS, MORE_GPTS["gpt-oss"]], ids=["latents", "gpt-oss"])
def test_latents_and_experts_are_served_on_a_gpu(options: dict[str, Any]) -> None:
    config = GPTConfig(**(SIZES | options))
    model: Any = GPTModel(config, VOCAB)
    init_parameters(model, 3)
    model = model.eval().to("cuda")
    prompts = some_prompts(3, 17, 9)
    requests = requests_of(prompts, 12)
    expected = run_requests(decoder_of(model, prompts, 12), requests).outputs
    engine = build_engine(model, block_size=16, num_blocks=16)
    assert [c.tokens for c in run_all(engine, requests)] == expected


def test_graphs_and_eager_steps_agree_in_bf16() -> None:
    """By the second token, the first that a graph makes."""
    model, prompts = model_of(SMOOTH, torch.bfloat16), some_prompts(3, 17, 9, 12, 5)
    scores: list[torch.Tensor] = []
    for graphs in (0, 2):
        engine = build_engine(
            model,
            block_size=16,
            num_blocks=64,
            inference_dynamic_batching_num_cuda_graphs=graphs,
        )
        requests = [replace(r, log_probs=True) for r in requests_of(prompts, 12)]
        scores.append(torch.tensor([c.log_probs[1] for c in run_all(engine, requests)]))
    torch.testing.assert_close(scores[0], scores[1], rtol=5e-2, atol=0.1)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_products_of_8_bit_weights_are_near(kind: Kind) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    weight = torch.randn(256, 512, generator=generator, device="cuda")
    quantized = quantize(weight.bfloat16(), kind)
    for rows in (1, 7, 300):
        x = torch.randn(rows, 1, 512, generator=generator, device="cuda").bfloat16()
        exact = functional.linear(x.float(), weight)
        found = quantized_linear(x, quantized, None).float()
        assert relative_error(found, exact) < {"int8": 0.02, "fp8": 0.06}[kind]


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_graphs_of_a_quantized_model_agree_with_eager_steps(kind: Kind) -> None:
    scores: list[torch.Tensor] = []
    for graphs in (0, 2):
        engine = build_engine(
            model_of(SMOOTH, torch.bfloat16),
            block_size=16,
            num_blocks=64,
            inference_weight_dtype=kind,
            inference_dynamic_batching_num_cuda_graphs=graphs,
        )
        requests = requests_of(some_prompts(3, 17, 9), 4, log_probs=True)
        scores.append(torch.tensor([c.log_probs[1] for c in run_all(engine, requests)]))
    torch.testing.assert_close(scores[0], scores[1], rtol=5e-2, atol=0.1)
