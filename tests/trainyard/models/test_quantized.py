"""Weights of 8 bits are the nearest ones, and their products those of the matrix that they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.trainyard.inference.dynamic.engines import build_engine, requests_of, run_all
from tests.trainyard.inference.small_models import build, run, some_prompts
from trainyard.fp8.weights import Kind, quantize, quantized_linear
from trainyard.models.quantized import quantize_layers
from trainyard.testing.tolerances import FP32_SUM_ORDER

ERRORS: dict[Kind, float] = {"int8": 0.5 / 127, "fp8": 2**-4}
"""Of a value at most, in parts of the largest of its row, or of itself."""


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_quantized_weight_is_near_and_its_product_exact(kind: Kind) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(24, 40, generator=generator) * torch.logspace(-3, 2, 24).unsqueeze(1)
    weight[3] = 0.0
    quantized = quantize(weight, kind)
    near = quantized.values.float() * quantized.scale.unsqueeze(1)
    largest = weight.abs().amax(dim=1, keepdim=True)
    assert bool(((near - weight).abs() <= ERRORS[kind] * largest * 1.0001).all())
    torch.testing.assert_close(near.abs().amax(dim=1, keepdim=True), largest)
    x, bias = torch.randn(2, 3, 40, generator=generator), torch.randn(24, generator=generator)
    torch.testing.assert_close(
        quantized_linear(x, quantized, bias), functional.linear(x, near, bias), **FP32_SUM_ORDER
    )


@pytest.mark.parametrize(("family", "kind"), [("llama", "int8"), ("deepseek", "fp8")])
def test_a_quantized_model_serves_what_its_rounded_weights_do(family: str, kind: Kind) -> None:
    rounded: Any = build(family)
    model: Any = build(family)
    before = sum(p.numel() for p in model.parameters())
    assert quantize_layers(model, kind) > 0
    assert sum(p.numel() for p in model.parameters()) < before
    for name, module in model.named_modules():
        if (quantized := getattr(module, "quantized", None)) is not None:
            exact = quantized.values.float() * quantized.scale.unsqueeze(1)
            rounded.get_submodule(name).weight.data.copy_(exact)
    prompts = some_prompts(3, 9)
    expected = run(rounded, prompts, 6, log_probs=True).completions
    found = run_all(build_engine(model), requests_of(prompts, 6, log_probs=True))
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        mine, theirs = torch.tensor(one.log_probs), torch.tensor(other.log_probs)
        torch.testing.assert_close(mine, theirs, **FP32_SUM_ORDER)


def test_an_engine_quantizes_its_model_if_asked() -> None:
    model: Any = build("gpt")
    engine = build_engine(model, inference_weight_dtype="int8")
    assert model.decoder.layers["0"].mlp.linear_fc1.quantized.values.dtype == torch.int8
    assert len(run_all(engine, requests_of(some_prompts(3), 2))[0].tokens) == 2
