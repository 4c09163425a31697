"""Generation by Mamba-2 and hybrids on a GPU, in fp32, plainly and with the step recorded as a CUDA
graph: the tokens of the CPU.

python -m pytest -m gpu tests/gpu/test_mamba_generation.py"""

from __future__ import annotations

import pytest
import torch

from tests.trainyard.inference.dynamic.engines import build_engine, requests_of, run_all
from tests.trainyard.inference.small_models import MAMBAS, build, decoder_of, run, some_prompts
from trainyard.inference.decoders import CachedDecoder
from trainyard.inference.request import Request
from trainyard.inference.static import run_requests
from trainyard.models.gpt.model import GPTModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS, COUNT = some_prompts(3, 17, 9, 1), 24


def models_of(kind: str) -> tuple[GPTModel, GPTModel]:
    """The same model on the CPU and on the GPU."""
    first, second = build(kind), build(kind).requires_grad_(False).cuda()
    assert isinstance(first, GPTModel)
    assert isinstance(second, GPTModel)
    return first, second


@pytest.mark.parametrize("kind", MAMBAS)
def test_a_static_batch_has_the_tokens_of_the_cpu(kind: str) -> None:
    on_cpu, on_gpu = models_of(kind)
    expected = run(on_cpu, PROMPTS, COUNT).outputs
    assert run(on_gpu, PROMPTS, COUNT).outputs == expected
    assert [run(on_gpu, [prompt], COUNT).outputs[0] for prompt in PROMPTS] == expected


@pytest.mark.parametrize("kind", ["mamba", "hybrid"])
def test_a_recorded_step_has_the_tokens_of_the_cpu(kind: str) -> None:
    on_cpu, on_gpu = models_of(kind)
    requests = [Request(prompt=p, max_tokens=COUNT, number=i) for i, p in enumerate(PROMPTS)]
    expected = run_requests(decoder_of(on_cpu, PROMPTS, COUNT), requests).outputs
    decoder = CachedDecoder(on_gpu, len(PROMPTS), 17 + COUNT, compiled=True)
    assert run_requests(decoder, requests).outputs == expected
    assert run_requests(decoder, requests).outputs == expected, "a next batch"


@pytest.mark.parametrize(("kind", "num_graphs"), [("hybrid moe", 0), ("mamba", 2), ("hybrid", 2)])
def test_the_dynamic_engine_has_the_tokens_of_the_cpu(kind: str, num_graphs: int) -> None:
    on_cpu, on_gpu = models_of(kind)
    expected = run(on_cpu, PROMPTS, COUNT).outputs
    engine = build_engine(
        on_gpu,
        num_blocks=20,
        max_requests=3,
        max_tokens=11,
        inference_dynamic_batching_num_cuda_graphs=num_graphs,
    )
    for _ in range(2):
        found = run_all(engine, requests_of(PROMPTS, COUNT), arrive_every=2)
        assert [one.tokens for one in found] == expected
