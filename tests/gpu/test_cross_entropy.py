"""Cross entropy by our kernels, against torch in fp64.

python -m pytest -m gpu tests/gpu/test_cross_entropy.py"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import init_parameters
from trainyard.parallel.model import ALONE
from trainyard.parallel.tensor import cross_entropy
from trainyard.parallel.tensor.vocab import vocab_parallel_cross_entropy
from trainyard.training.loop.build import compile_chunk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
S, B = 33, 3
SIZES = [(24, 24), (24, 5), (2048, 2048), (2056, 2049), (5003, 4999), (50304, 50257)]
"""Logits, of which so many count."""
LOSS: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}
GRADIENT: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 5e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2**-8, "atol": 1e-6},
    torch.float16: {"rtol": 2**-10, "atol": 1e-6},
}
"""At a label of almost all the probability, 1 is taken from a number close to it."""


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE)


def drawn_labels(size: int) -> Tensor:
    return torch.randint(size, (S, B), generator=torch.Generator().manual_seed(2)).to(DEVICE)


def reference(logits: Tensor, labels: Tensor, grad: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Losses, and the gradient of all logits, in fp64."""
    leaf = logits.double().requires_grad_()
    flat = leaf.flatten(0, 1)[:, :size]
    losses = functional.cross_entropy(flat, labels.flatten(), reduction="none").view(S, B)
    losses.backward(grad.double())
    assert leaf.grad is not None
    return losses.detach(), leaf.grad


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", GRADIENT, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("scale", [1.0, 100.0], ids=["", "exponentials overflow"])
@pytest.mark.parametrize(("num_logits", "size"), SIZES)
def test_losses_and_gradients(
    num_logits: int, size: int, scale: float, dtype: torch.dtype, compiled: bool
) -> None:
    torch._dynamo.reset()
    logits = (draw(S, B, num_logits, seed=1) * scale).to(dtype)
    logits[..., size:] = float("inf")
    logits[..., : size // 3] = float("-inf")
    labels, grad = drawn_labels(size).clamp(min=size // 3), draw(S, B, seed=3)
    expected, expected_grad = reference(logits, labels, grad, size)

    def loss(x: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(x * 1.0, labels, ALONE, size)

    run = torch.compile(loss, fullgraph=True) if compiled else loss
    found = []
    for _ in range(2):
        leaf = logits.clone().requires_grad_()
        losses = run(leaf)
        losses.backward(grad)
        assert leaf.grad is not None
        found.append((losses.detach(), leaf.grad))
    losses, gradient = found[0]
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, **LOSS)
    # What is left of two numbers near 1 is as near as the logits are.
    bound = GRADIENT[dtype] if scale == 1.0 else {**GRADIENT[dtype], "atol": 2e-5}
    torch.testing.assert_close(gradient.double(), expected_grad, **bound)
    assert not gradient[..., size:].any(), "zero, and not nearly so"
    for one, again in zip(*found, strict=True):
        assert torch.equal(one, again)


@pytest.mark.parametrize("expanded", [False, True])
def test_the_gradient_takes_the_memory_of_the_logits(expanded: bool) -> None:
    leaf = draw(S, B, 4000, seed=1).bfloat16().requires_grad_()
    logits = leaf * 1.0
    at, kept = logits.data_ptr(), []
    logits.register_hook(kept.append)
    losses = vocab_parallel_cross_entropy(logits, drawn_labels(4000), ALONE)
    total = losses.sum() if expanded else (losses * draw(S, B, seed=3)).sum()
    total.backward(retain_graph=True)
    assert [gradient.data_ptr() for gradient in kept] == [at]
    with pytest.raises(RuntimeError, match="have become their gradient"):
        total.backward()


class Exchange:
    """`all_reduce` among threads, each of which is a rank; the group is its number."""

    def __init__(self, size: int) -> None:
        self.slots: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def __call__(self, x: Tensor, rank: int, op: str = "sum") -> Tensor:
        self.slots[rank] = x
        self.barrier.wait()
        stacked = torch.stack([slot for slot in self.slots if slot is not None])
        self.barrier.wait()
        return stacked.sum(0) if op == "sum" else stacked.amax(0)


@pytest.mark.parametrize("size", [4000, 3001, 2000, 5])
def test_ranks_with_a_part_of_the_vocabulary_each(size: int) -> None:
    num_ranks, num_logits = 4, 4000
    logits = draw(S, B, num_logits, seed=1).bfloat16()
    logits += torch.arange(num_logits, device=DEVICE).bfloat16() / 100  # maxima differ
    labels, grad = drawn_labels(size), draw(S, B, seed=3)
    expected, expected_grad = reference(logits, labels, grad, size)
    of_rank = num_logits // num_ranks

    def rank_runs(rank: int) -> tuple[Tensor, Tensor]:
        leaf = logits.chunk(num_ranks, dim=-1)[rank].clone().flatten(0, 1).requires_grad_()
        width = min(max(size - rank * of_rank, 0), of_rank)
        local = labels.flatten() - rank * of_rank
        apply: Any = cross_entropy._CrossEntropy.apply
        losses = apply(leaf * 1.0, local, width, rank)
        (gradient,) = torch.autograd.grad(losses, leaf, grad.flatten())
        return losses.detach(), gradient

    with (
        mock.patch.object(cross_entropy, "all_reduce", Exchange(num_ranks)),
        ThreadPoolExecutor(num_ranks) as pool,
    ):
        found = list(pool.map(rank_runs, range(num_ranks)))
    for losses, _ in found:
        torch.testing.assert_close(losses.double().view(S, B), expected, **LOSS)
    gradient = torch.cat([part.view(S, B, -1) for _, part in found], dim=-1)
    torch.testing.assert_close(gradient.double(), expected_grad, **GRADIENT[torch.bfloat16])
    assert not gradient[..., size:].any()


def test_a_training_keeps_the_logits_once() -> None:
    torch._dynamo.reset()
    vocab, length = 1 << 17, 512
    config = GPTConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=1,
        seq_length=length,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    with torch.device("cuda"):
        model = GPTModel(config, vocab, true_vocab_size=vocab - 5)
    init_parameters(model, 3)
    model.bfloat16()
    compile_chunk(model)
    tokens = torch.arange(2 * length, device="cuda").view(2, length)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model.loss(tokens, tokens.roll(-1, 1)).mean().backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 1.5 * (2 * length * vocab * 2)
