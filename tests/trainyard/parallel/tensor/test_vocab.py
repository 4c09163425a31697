"""A cut vocabulary against a whole one: embedding, cross entropy, and the memory it takes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from trainyard.parallel.model import ALONE, ModelParallel
from trainyard.parallel.sharding import shard_of
from trainyard.parallel.tensor import cross_entropy
from trainyard.parallel.tensor.vocab import VocabParallelEmbedding, vocab_parallel_cross_entropy
from trainyard.testing.pool import RankPool
from trainyard.testing.tolerances import FP32_SUM_ORDER

pytestmark = pytest.mark.slow

S, B, H, V = 8, 2, 6, 24


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def token_ids(seed: int, size: int = V) -> Tensor:
    return torch.randint(size, (S, B), generator=torch.Generator().manual_seed(seed))


def check_embedding(sequence_parallel: bool) -> None:
    parallel = ModelParallel(tp=dist.group.WORLD, sequence_parallel=sequence_parallel)
    layer = VocabParallelEmbedding(V, H, parallel=parallel)
    whole = draw(V, H, seed=1).requires_grad_()
    shard = shard_of(layer.weight)
    assert shard is not None
    layer.weight.data.copy_(shard.take(whole.detach()))
    expected = functional.embedding(token_ids(2), whole)
    grad = draw(S, B, H, seed=3)
    expected.backward(grad)
    y = layer(token_ids(2))
    if sequence_parallel:
        size, rank = parallel.tp_size, parallel.tp_rank
        expected, grad = expected.chunk(size)[rank], grad.chunk(size)[rank]
    assert torch.equal(y, expected), "one summand is not zero, so nothing is rounded"
    y.backward(grad)
    assert whole.grad is not None
    torch.testing.assert_close(layer.weight.grad, shard.take(whole.grad), **FP32_SUM_ORDER)


@pytest.mark.distributed
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_embedding_matches_one_table(ranks: RankPool, tp: int, sequence_parallel: bool) -> None:
    ranks.run(check_embedding, tp, sequence_parallel)


def reference(
    logits: Tensor, labels: Tensor, grad: Tensor, vocab_size: int = V
) -> tuple[Tensor, Tensor]:
    """In fp64, over a vocabulary that has no padding; the gradient of padding is zero."""
    leaf = logits.double().requires_grad_()
    tokens = leaf.flatten(0, 1)[:, :vocab_size]
    losses = functional.cross_entropy(tokens, labels.flatten(), reduction="none")
    losses.view(labels.shape).backward(grad.double())
    assert leaf.grad is not None
    return losses.detach().view(labels.shape), leaf.grad


def check_cross_entropy(chunk: int, scale: float, vocab_size: int | None = None) -> None:
    parallel = ModelParallel(tp=dist.group.WORLD)
    size = vocab_size or V
    logits, labels, grad = draw(S, B, V, seed=1) * scale, token_ids(2, size), draw(S, B, seed=3)
    logits[..., size:] += 1000.0  # padding would be all of the softmax
    expected, expected_grad = reference(logits, labels, grad, size)
    leaf = logits.chunk(parallel.tp_size, dim=-1)[parallel.tp_rank].clone().requires_grad_()
    with mock.patch.object(cross_entropy, "CHUNK_LOGITS", chunk):
        losses = vocab_parallel_cross_entropy(leaf * 1.0, labels, parallel, vocab_size)
        losses.backward(grad)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, **FP32_SUM_ORDER)
    mine = expected_grad.chunk(parallel.tp_size, dim=-1)[parallel.tp_rank]
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.double(), mine, **FP32_SUM_ORDER)
    first = max(0, size - parallel.tp_rank * leaf.shape[-1])
    assert not leaf.grad[..., first:].any(), "zero, and not nearly so"


@pytest.mark.distributed
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("chunk", "scale", "vocab_size"),
    [
        (1 << 24, 1.0, None),
        (10, 1.0, None),
        (30, 100.0, None),  # exponentials overflow
        (30, 1.0, 23),  # rows of padding on one rank, on its last, on ranks that have no others
        (30, 1.0, 13),
        (30, 1.0, 5),
    ],
)
def test_cross_entropy_matches_one_process(
    ranks: RankPool, tp: int, chunk: int, scale: float, vocab_size: int | None
) -> None:
    ranks.run(check_cross_entropy, tp, chunk, scale, vocab_size)


def test_fp32_alone_has_the_bits_of_torch() -> None:
    logits, labels = draw(S, B, V, seed=1), token_ids(2)
    flat = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    losses = vocab_parallel_cross_entropy(logits, labels, ALONE)
    assert torch.equal(losses, flat.view(S, B))
    assert torch.equal(vocab_parallel_cross_entropy(logits, labels, ALONE, V), losses)


@pytest.mark.parametrize("vocab_size", [None, 13])
def test_nothing_of_the_size_of_fp32_logits_is_kept(vocab_size: int | None) -> None:
    """What autograd saves: the bf16 logits themselves, and a few numbers for each token."""
    logits = draw(S, B, V, seed=1).bfloat16().requires_grad_() * 1.0
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        losses = vocab_parallel_cross_entropy(logits, token_ids(2, 13), ALONE, vocab_size)
    large = [tensor for tensor in saved if tensor.numel() > S * B]
    assert [tensor.data_ptr() for tensor in large] == [logits.data_ptr()]
    losses.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="have become their gradient"):
        losses.sum().backward()


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("vocab_size", [None, 13])
def test_bf16_logits_are_taken_as_fp32_and_give_a_bf16_gradient(
    vocab_size: int | None, is_compiled: bool
) -> None:
    size = vocab_size or V
    logits, labels, grad = draw(S, B, V, seed=1).bfloat16(), token_ids(2, size), draw(S, B, seed=3)
    logits[..., size:] += 1000.0  # whose exponential overflows
    expected, expected_grad = reference(logits, labels, grad, size)

    def loss(x: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(x * 1.0, labels, ALONE, vocab_size)

    if is_compiled:
        loss = torch.compile(loss, fullgraph=True, backend="aot_eager")
    leaf = logits.clone().requires_grad_()
    losses = loss(leaf)
    losses.backward(grad)
    torch.testing.assert_close(losses.double(), expected, **FP32_SUM_ORDER)
    assert leaf.grad is not None
    assert leaf.grad.dtype == torch.bfloat16
    torch.testing.assert_close(leaf.grad.double(), expected_grad, rtol=2**-8, atol=1e-6)
    assert not leaf.grad[..., size:].any()
