"""The gradient of the attention operators, registered in one way.

A forward operator takes q, k, v, a sink or None, other tensors, then constants. It returns the
output, its log-sum-exp and the state of its dropout. The backward operator takes the gradient of
the output, q, k, v, these three results, the other tensors and the constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from trainyard.attention.merge_lse import sink_gradient

SinkGradient = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def register_gradient(
    forward: Any, backward: Any, num_tensors: int, sinks: SinkGradient = sink_gradient
) -> None:
    """Make the operator `backward` the gradient of `forward`.

    num_tensors: inputs of `forward` before its constants. sinks: the gradient of the sink, from
    that of the output, the output, its log-sum-exp and the sink."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:num_tensors], *output)
        ctx.constants = inputs[num_tensors:]

    def gradient(ctx: Any, dout: Tensor, dlse: Any, drng: Any) -> tuple[Any, ...]:
        q, k, v, sink, *others, out, lse, rng = ctx.saved_tensors
        dq, dk, dv = backward(dout, q, k, v, out, lse, rng, *others, *ctx.constants)
        dsink = None
        if sink is not None and ctx.needs_input_grad[3]:
            dsink = sinks(dout, out, lse, sink)
        return dq, dk, dv, dsink, *([None] * (len(others) + len(ctx.constants)))

    forward.register_autograd(gradient, setup_context=setup)
