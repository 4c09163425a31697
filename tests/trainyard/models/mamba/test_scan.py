"""The scan in chunks against the recurrence it stands for, token by token."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from trainyard.models.mamba.conv import causal_conv
from trainyard.models.mamba.scan import chunked_scan, next_state

BATCH, LENGTH, GROUPS, HEADS, CHANNELS, STATE = 2, 11, 2, 3, 4, 5
CLOSE = {"rtol": 1e-4, "atol": 1e-5}

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
DOCUMENTS = torch.tensor([[1, 1, 1, 2, 2, 3, 3, 3, 3, 3, 4], [1] * 11])


def inputs(seed: int = 0) -> Inputs:
    """x, dt, a, b, c."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    heads = (BATCH, LENGTH, GROUPS, HEADS)
    return (
        draw(*heads, CHANNELS).requires_grad_(),
        draw(*heads).exp().requires_grad_(),
        (-draw(GROUPS, HEADS).exp()).requires_grad_(),
        draw(BATCH, LENGTH, GROUPS, STATE).requires_grad_(),
        draw(BATCH, LENGTH, GROUPS, STATE).requires_grad_(),
    )


def by_recurrence(
    values: Inputs, documents: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, one token after the other."""
    x, dt, a, b, c = values
    if state is None:
        state = x.new_zeros(BATCH, GROUPS, HEADS, CHANNELS, STATE)
    found = []
    for t in range(x.shape[1]):
        if documents is not None and t:
            same = documents[:, t] == documents[:, t - 1]
            state = torch.where(same[:, None, None, None, None], state, 0.0)
        decay = torch.exp(dt[:, t] * a)
        write = torch.einsum("bgr,bgrp,bgn->bgrpn", dt[:, t], x[:, t], b[:, t])
        state = decay[..., None, None] * state + write
        found.append(torch.einsum("bgrpn,bgn->bgrp", state, c[:, t]))
    return torch.stack(found, dim=1), state


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize("chunk_size", [1, 4, 11, 64])
def test_a_scan_in_chunks_of_any_size_is_the_recurrence(
    chunk_size: int, documents: Tensor | None
) -> None:
    values, expected = inputs(), inputs()
    y, state = chunked_scan(*values, chunk_size, documents)
    want, last = by_recurrence(expected, documents)
    torch.testing.assert_close(y, want, **CLOSE)
    torch.testing.assert_close(state, last, **CLOSE)
    (y.square().sum() + state.sum()).backward()
    (want.square().sum() + last.sum()).backward()
    for found, other in zip(values, expected, strict=True):
        torch.testing.assert_close(found.grad, other.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("cut", [1, 4, 7])
def test_the_state_behind_a_part_continues_the_scan(cut: int) -> None:
    x, dt, a, b, c = inputs()
    whole, last = chunked_scan(x, dt, a, b, c, 3)
    first = (x[:, :cut], dt[:, :cut], a, b[:, :cut], c[:, :cut])
    second = (x[:, cut:], dt[:, cut:], a, b[:, cut:], c[:, cut:])
    before, state = chunked_scan(*first, 3)
    after, state = chunked_scan(*second, 3, state=state)
    torch.testing.assert_close(torch.cat((before, after), dim=1), whole, **CLOSE)
    torch.testing.assert_close(state, last, **CLOSE)


def test_a_step_is_a_scan_of_one_token() -> None:
    x, dt, a, b, c = inputs()
    _, state = chunked_scan(x, dt, a, b, c, 4)
    one = (x[:, :1], dt[:, :1], a, b[:, :1], c[:, :1])
    want, last = chunked_scan(*one, 4, state=state)
    y, after = next_state(state, x[:, 0], dt[:, 0], a, b[:, 0], c[:, 0])
    torch.testing.assert_close(y, want[:, 0], **CLOSE)
    torch.testing.assert_close(after, last, **CLOSE)


def test_fast_decay_leaves_no_infinities() -> None:
    x, dt, a, b, c = (tensor.detach() for tensor in inputs())
    values = (x, 1000 * dt, 16 * a, b, c)
    for tensor in values:
        tensor.requires_grad_()
    y, _ = chunked_scan(*values, 4)
    y.sum().backward()
    assert all(bool(torch.isfinite(tensor.grad).all()) for tensor in values)  # type: ignore[arg-type]


def test_the_convolution_is_torchs() -> None:
    x, weight, bias = torch.randn(BATCH, LENGTH, 6), torch.randn(6, 1, 4), torch.randn(6)
    padded = torch.nn.functional.pad(x.transpose(1, 2), (3, 0))
    want = torch.nn.functional.conv1d(padded, weight, bias, groups=6).transpose(1, 2)
    found = causal_conv(x, weight, bias)
    torch.testing.assert_close(found, torch.nn.functional.silu(want), **CLOSE)


def test_the_convolution_of_documents_is_that_of_each_alone() -> None:
    x, weight, bias = torch.randn(BATCH, LENGTH, 6), torch.randn(6, 1, 4), torch.randn(6)
    found = causal_conv(x, weight, bias, DOCUMENTS)
    bounds = [0, 3, 5, 10, 11]
    for begin, end in pairwise(bounds):
        alone = causal_conv(x[:1, begin:end], weight, bias)
        torch.testing.assert_close(found[:1, begin:end], alone, **CLOSE)


def test_the_convolution_goes_on_from_earlier_inputs() -> None:
    x, weight, bias = torch.randn(BATCH, LENGTH, 6), torch.randn(6, 1, 4), torch.randn(6)
    after = causal_conv(x[:, 5:], weight, bias, before=x[:, 2:5])
    torch.testing.assert_close(after, causal_conv(x, weight, bias)[:, 5:], **CLOSE)
