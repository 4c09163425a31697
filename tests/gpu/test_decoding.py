"""The kernels of the static engine's recorded step against torch, and the step against the CPU.

python -m pytest -m gpu tests/gpu/test_decoding.py"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.trainyard.inference.small_models import LLAMA, SIZES, VOCAB, run, some_prompts
from trainyard.attention.base import Softmax
from trainyard.attention.one_query import one_query_attention
from trainyard.attention.paged import attends_in_rows, row_attention
from trainyard.fp8.weights import quantize, quantized_linear
from trainyard.inference.decoders import CachedDecoder
from trainyard.inference.request import NO_TOKEN, Request
from trainyard.inference.sampling import likeliest_tokens
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

PROMPTS, COUNT = some_prompts(3, 17, 9, 1), 24
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": LLAMA,
    "window": LLAMA | {"window_size": "5,0"},
    "sinks": LLAMA | {"softmax_type": "learnable"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_step_has_the_tokens_of_the_cpu(kind: str) -> None:
    torch._dynamo.reset()
    model = GPTModel(GPTConfig(**(SIZES | KINDS[kind])), VOCAB)
    init_parameters(model, 3)
    model = model.eval().requires_grad_(False)
    expected = run(model, PROMPTS, COUNT).outputs
    decoder = CachedDecoder(model.cuda(), len(PROMPTS), 17 + COUNT, compiled=True)
    requests = [Request(prompt=p, max_tokens=COUNT, number=i) for i, p in enumerate(PROMPTS)]
    assert run_requests(decoder, requests).outputs == expected
    assert run_requests(decoder, requests).outputs == expected, "a next batch"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "room"), [(1, 1152), (8, 1152), (64, 200), (3, 37)])
def test_a_query_of_each_row_attends_as_in_torch(rows: int, room: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    q, k, v = draw(rows, 32, 1, 128), draw(rows, 8, room, 128), draw(rows, 8, room, 128)
    lengths = torch.randint(1, room + 1, (rows,), generator=generator, device="cuda")
    lengths[0] = room
    assert attends_in_rows(q, v)
    found = row_attention(q, k, v, lengths, Softmax(0.09), None)
    allowed = (torch.arange(room, device="cuda") < lengths[:, None])[:, None, None]
    exact = one_query_attention(*(x.float() for x in (q, k, v)), allowed, 0.09)
    assert relative_error(found.float(), exact) < (1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("vocab_size", [5, 5000, 128256])
def test_the_likeliest_tokens_are_those_of_argmax(vocab_size: int) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    padded = torch.randn(64, vocab_size + 3, generator=generator, device="cuda").bfloat16()
    padded[:, vocab_size:] = 100.0
    logits = padded[:, :vocab_size]
    logits[0, 1] = logits[0, 4] = 90.0
    logits[1, 3], logits[2, 0], logits[3] = math.nan, math.inf, -math.inf
    first = (logits == logits.amax(1, keepdim=True)).int().argmax(1)  # of equals
    first[1:4] = NO_TOKEN
    assert torch.equal(likeliest_tokens(logits), first)


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64, 65])
@pytest.mark.parametrize("shape", [(256, 512), (80, 4112)])
def test_products_of_few_rows_are_near(rows: int, shape: tuple[int, int]) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)
    weight = torch.randn(shape, generator=generator, device="cuda")
    x = torch.randn(1, rows, shape[1], generator=generator, device="cuda").bfloat16()
    found = quantized_linear(x, quantize(weight.bfloat16(), "fp8"), None)
    assert relative_error(found.float(), functional.linear(x.float(), weight)) < 0.06
