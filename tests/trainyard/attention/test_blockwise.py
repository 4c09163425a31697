"""Attention from blocks, with and without a sink, against a softmax written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trainyard.attention.base import Softmax
from trainyard.attention.blockwise import AttentionBlock, block_attention, causal_blocks
from trainyard.attention.lse_kernels import BlockCall, Saved, block_backward, block_forward
from trainyard.testing.tolerances import FP32_SUM_ORDER

S, SCALE = 12, 0.3
WHOLE = [AttentionBlock(0, S, 0, S, causal=True)]
PIECES = causal_blocks(0, 5, 0) + causal_blocks(5, S, 5)
KERNELS = ("cpu", "math")


def inputs(dtype: torch.dtype = torch.float32, s: int = S, n: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(2, n, s, 8), (2, 2, s, 8), (2, 2, s, 8), (n,)]
    return [torch.randn(x, generator=generator, dtype=dtype).requires_grad_() for x in shapes]


def written_out(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Tensor:
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * SCALE
    future = torch.ones(q.shape[2], k.shape[2]).triu(1).bool()
    scores = scores.masked_fill(future, -math.inf)
    if sink is not None:
        column = sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    return scores.softmax(dim=-1)[..., : k.shape[2]] @ v


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("blocks", [WHOLE, PIECES], ids=["whole", "pieces"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_blocks_make_up_attention(
    kernel: str, blocks: list[AttentionBlock], with_sink: bool
) -> None:
    q, k, v, sink = inputs()
    given = [q, k, v, sink] if with_sink else [q, k, v]
    out = block_attention(q, k, v, blocks, kernel, Softmax(SCALE, sink=sink if with_sink else None))
    expected = written_out(q, k, v, sink if with_sink else None)
    torch.testing.assert_close(out, expected, **FP32_SUM_ORDER)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found, right = (torch.autograd.grad(x, given, weights) for x in (out, expected))
    torch.testing.assert_close(found, right, **FP32_SUM_ORDER)


def test_a_sink_of_minus_infinity_is_none() -> None:
    q, k, v, _ = inputs()
    nowhere = torch.full((4,), -math.inf)
    with_sink = block_attention(q, k, v, WHOLE, "cpu", Softmax(SCALE, sink=nowhere))
    torch.testing.assert_close(with_sink, block_attention(q, k, v, WHOLE, "cpu", Softmax(SCALE)))


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [WHOLE, PIECES], ids=["whole", "pieces"])
def test_dropout_is_the_same_backward(blocks: list[AttentionBlock]) -> None:
    if blocks is PIECES:
        blocks = causal_blocks(0, 2, 0) + causal_blocks(2, 4, 2)
    else:
        blocks = [AttentionBlock(0, 4, 0, 4, causal=True)]
    q, k, v, sink = inputs(torch.float64, s=4, n=2)

    def dropped(*tensors: Tensor) -> Tensor:
        torch.manual_seed(3)
        return block_attention(*tensors[:3], blocks, "cpu", Softmax(SCALE, 0.4, tensors[3]))

    assert not torch.equal(dropped(q, k, v, sink), written_out(q, k, v, sink))
    assert torch.autograd.gradcheck(dropped, (q, k, v, sink))


@pytest.mark.slow
def test_dropout_keeps_the_mean() -> None:
    q, k, v, _ = (x.detach() for x in inputs())
    torch.manual_seed(0)
    softmax = Softmax(SCALE, 0.3)
    mean = sum(block_attention(q, k, v, PIECES, "math", softmax) for _ in range(2000)) / 2000
    torch.testing.assert_close(mean, written_out(q, k, v, None), rtol=0, atol=0.1)


def test_windows_of_the_plain_kernel_are_aligned_at_the_last_key() -> None:
    q, k, v, _ = inputs()
    mask = torch.zeros(1, 1, 3, S, dtype=torch.bool)
    for row, last in enumerate(range(S - 3, S)):
        mask[..., row, last - 2 : last + 1] = True
    some = q[:, :, -3:]
    windowed = block_forward("math", some, k, v, BlockCall(SCALE, True, window_left=2))
    masked = block_forward("math", some, k, v, BlockCall(SCALE, mask=mask))
    torch.testing.assert_close(windowed[0], masked[0])
    grads = [
        block_backward("math", windowed[0], Saved(some, k, v, *windowed), call)
        for call in (BlockCall(SCALE, True, window_left=2), BlockCall(SCALE, mask=mask))
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.slow
def test_a_compiler_takes_it_whole() -> None:
    q, k, v, sink = inputs()
    plan = [int(number) for block in PIECES for number in block]
    args = (q, k, v, sink, None, plan, "cpu", SCALE, 0.0, -1, -1)
    torch.library.opcheck(torch.ops.trainyard.block_attention.default, args)
