"""One layer, and the stack of them with the norm at its end."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from trainyard.models.attention import KVCache, SelfAttention
from trainyard.models.config import GPTConfig
from trainyard.models.mlp import MLP
from trainyard.models.norm import build_norm


class TransformerLayer(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)), dropout on each branch."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.input_layernorm = build_norm(config)
        self.self_attention = SelfAttention(config, layer)
        self.pre_mlp_layernorm = build_norm(config)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        kv_cache: KVCache | None = None,
    ) -> Tensor:
        """x: (s, b, h). Returns (s, b, h)."""
        branch = self.self_attention(self.input_layernorm(x), rotary, mask, kv_cache)
        x = x + functional.dropout(branch, self.dropout, self.training)
        branch = self.mlp(self.pre_mlp_layernorm(x))
        return x + functional.dropout(branch, self.dropout, self.training)


class TransformerBlock(nn.Module):
    """The layers in order and the final norm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer(config, i) for i in range(config.num_layers))
        self.final_layernorm = build_norm(config)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        kv_cache: KVCache | None = None,
    ) -> Tensor:
        """x: (s, b, h). Returns (s, b, h), normalised."""
        for layer in self.layers:
            x = layer(x, rotary, mask, kv_cache)
        normalised: Tensor = self.final_layernorm(x)
        return normalised
