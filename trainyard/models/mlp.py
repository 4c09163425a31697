"""The feed-forward half of a layer: GELU, or gated with SiLU (SwiGLU, arXiv:2002.05202)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from trainyard.models.config import GPTConfig
from trainyard.models.linear import Linear


class MLP(nn.Module):
    """linear_fc1, activation, linear_fc2; gated: the rows of linear_fc1 are [gate; up].

    GELU is the tanh form, as in GPT-2 and in Megatron-LM's fused bias and GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gated = config.swiglu
        width = config.ffn_size * (2 if self.gated else 1)
        self.linear_fc1 = Linear(config.hidden_size, width, bias=config.linear_bias)
        self.linear_fc2 = Linear(config.ffn_size, config.hidden_size, bias=config.linear_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: (s, b, h). Returns (s, b, h)."""
        x = self.linear_fc1(x)
        if self.gated:
            gate, up = x.chunk(2, dim=-1)
            x = functional.silu(gate) * up
        else:
            x = functional.gelu(x, approximate="tanh")
        out: Tensor = self.linear_fc2(x)
        return out
