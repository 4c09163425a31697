"""An output that was sent on is freed, and backward goes from it all the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainyard.parallel.pipeline.outputs import backward_from, can_free, free_output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_from_a_freed_output_is_backward(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)
    inputs = torch.randn(3, 4, dtype=dtype)
    gradient = torch.randn(3, 4, dtype=dtype)
    found = []
    for freed in (False, True):
        module.zero_grad()
        hidden = inputs.clone().requires_grad_()
        output = module(hidden)
        if freed:
            sent = output.detach()
            free_output(output)
            assert output.untyped_storage().nbytes() == dtype.itemsize
            assert sent.shape == (3, 4)  # a message on its way keeps its numbers
            backward_from(output, gradient)
        else:
            torch.autograd.backward(output, gradient)
        assert hidden.grad is not None
        found.append([hidden.grad, *(p.grad for p in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_output_that_its_own_operation_needs_survives() -> None:
    hidden = torch.randn(5, requires_grad=True)
    output = hidden.tanh()  # whose backward reads the output
    expected = 1 - output.detach() ** 2
    free_output(output)
    backward_from(output, torch.ones(5))
    torch.testing.assert_close(hidden.grad, expected)


def test_inputs_and_views_are_not_freed() -> None:
    leaf = torch.randn(4, requires_grad=True)
    assert not can_free(leaf)
    assert not can_free((leaf * 2).view(2, 2))
    assert can_free(leaf * 2)
