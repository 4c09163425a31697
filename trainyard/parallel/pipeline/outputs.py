"""Frees the output of a stage after it is sent, while backward can still start from it.

Autograd needs an output's place in the graph, not its values, which the next stage has. So its
memory is freed: s x b x h for each micro-batch in flight. In Megatron-LM this is
--deallocate-pipeline-outputs, which is always on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Variable


def can_free(output: Tensor) -> bool:
    """A leaf is someone's input, and freeing a view frees nothing."""
    return output.grad_fn is not None and output._base is None


def free_output(output: Tensor) -> None:
    """Leave of an output only its place in the graph."""
    assert can_free(output)
    output.data = torch.empty((1,), dtype=output.dtype, device=output.device)


def backward_from(output: Tensor, gradient: Tensor) -> None:
    """`torch.autograd.backward` for an output that may have been freed.

    torch.autograd compares the shapes of both in Python and would refuse; the engine behind it
    compares the gradient with the shape that the output had when it was made."""
    Variable._execution_engine.run_backward(
        (output,),
        (gradient,),
        False,  # keep_graph
        False,  # create_graph
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )
