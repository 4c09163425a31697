"""Options of a GPT and of a mixture of experts. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.config import check_above_zero, check_at_most
from trainyard.errors import ConfigError
from trainyard.models.config import MAX_SIZE, TransformerConfig


@dataclass(frozen=True, kw_only=True)
class GPTConfig(TransformerConfig):
    """A decoder-only transformer: GPT-2 and GPT-3, Llama, Mistral, Qwen and similar models."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output layer its own weights."""

    def num_params(self, padded_vocab_size: int) -> int:
        """Exact number of trained parameters: what `GPTModel.parameters()` sums to."""
        h = self.hidden_size
        embedding = padded_vocab_size * h
        if self.position_embedding_type == "learned_absolute":
            embedding += self.positions * h
        output = padded_vocab_size * h if self.untie_embeddings_and_output_weights else 0
        return embedding + self.num_layers * self.layer_params() + self.norm_params() + output

    @property
    def norm_tensors(self) -> int:
        """Vectors that a normalisation learns."""
        return 2 if self.normalization == "LayerNorm" else 1

    def norm_params(self) -> int:
        """Trained parameters of one normalisation of the residual stream."""
        return self.norm_tensors * self.hidden_size

    def layer_params(self) -> int:
        """Trained parameters of one layer."""
        h, f = self.hidden_size, self.ffn_size
        qkv, fc1 = self.query_size + 2 * self.kv_size, f * (2 if self.gated else 1)
        weights = qkv * h + self.query_size * h + fc1 * h + f * h
        biases = (qkv if self.qkv_bias else 0) + (2 * h + fc1 if self.linear_bias else 0)
        heads = 2 * self.norm_tensors * self.head_dim if self.qk_layernorm else 0
        sinks = self.num_attention_heads if self.softmax_type == "learnable" else 0
        return weights + biases + 2 * self.norm_params() + heads + sinks


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Experts of every layer, for the formulas of `stages.plan`; no model has experts yet."""

    num_experts: int | None = None
    """Experts in each layer's MLP; unset: a dense model."""
    moe_router_topk: int = 2
    """Experts that a token visits."""
    moe_ffn_hidden_size: int | None = None
    """Width inside an expert; unset: the model's --ffn-hidden-size."""

    def __post_init__(self) -> None:
        """Raise ConfigError for impossible counts."""
        if self.num_experts is None:
            return
        check_above_zero(self, "num_experts", "moe_ffn_hidden_size")
        check_at_most(self, MAX_SIZE, "num_experts", "moe_ffn_hidden_size")
        if not 0 < self.moe_router_topk <= self.num_experts:
            raise ConfigError(
                f"--moe-router-topk ({self.moe_router_topk}) must be from 1 to --num-experts "
                f"({self.num_experts})"
            )

    @property
    def enabled(self) -> bool:
        """Whether the model has experts."""
        return self.num_experts is not None


DENSE = MoEConfig()
