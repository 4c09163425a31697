"""What a GPT is made of, under Megatron-LM's names, and the numbers that follow from it.

Standard library only: a stage reads it before torch, and `plan` never needs torch at all."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.errors import ConfigError
from trainyard.models.config_layer import AttentionOptions, MLPOptions
from trainyard.models.config_memory import RecomputeOptions
from trainyard.models.config_sizes import MAX_PARAMS, ModelSizes, check_above_zero


@dataclass(frozen=True, kw_only=True)
class InitOptions(ModelSizes):
    """The first values of the weights."""

    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""
    embedding_init_method_std: float | None = None
    """Standard deviation of the embeddings; unset: --init-method-std."""
    init_method_xavier_uniform: bool = False
    """Draw the matrices of the layers uniformly, by Xavier's rule."""

    def _check_init(self) -> None:
        check_above_zero(self, "init_method_std", "embedding_init_method_std")


@dataclass(frozen=True, kw_only=True)
class GPTConfig(RecomputeOptions, InitOptions, MLPOptions, AttentionOptions):
    """A decoder-only transformer: GPT-2 and GPT-3, Llama, Mistral, Qwen and their kind."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output layer weights of its own."""

    def __post_init__(self) -> None:
        """Refuse what cannot be built, in words."""
        self._check_sizes()
        self._check_norms()
        self._check_positions()
        self._check_attention()
        self._check_mlp()
        self._check_init()
        self._check_recompute()
        self.check_params(self.make_vocab_size_divisible_by)

    def check_params(self, padded_vocab_size: int) -> None:
        """Refuse a model of more parameters than can be counted in bytes."""
        count = self.num_params(padded_vocab_size)
        if count > MAX_PARAMS:
            raise ConfigError(
                f"a model of {count:.1e} parameters, and at most {MAX_PARAMS:.0e} are taken: make "
                f"one of these smaller: --num-layers {self.num_layers}, --hidden-size "
                f"{self.hidden_size}, --ffn-hidden-size {self.ffn_size}, --num-attention-heads "
                f"{self.num_attention_heads} of --kv-channels {self.head_dim}, "
                f"--max-position-embeddings {self.positions}, {padded_vocab_size} rows of the "
                "embedding"
            )

    @property
    def qkv_bias(self) -> bool:
        """Whether the QKV projection has a bias."""
        return self.linear_bias or self.add_qkv_bias

    # --- questions before anything is built -----------------------------------------------

    def num_params(self, padded_vocab_size: int) -> int:
        """Every trained number, exactly: what `GPTModel.parameters()` sums to."""
        h = self.hidden_size
        embedding = padded_vocab_size * h
        if self.position_embedding_type == "learned_absolute":
            embedding += self.positions * h
        output = padded_vocab_size * h if self.untie_embeddings_and_output_weights else 0
        return embedding + self.num_layers * self.layer_params() + self.norm_params() + output

    def norm_params(self) -> int:
        """Trained numbers of one normalisation of the residual stream."""
        return self.norm_tensors * self.hidden_size

    def layer_params(self) -> int:
        """Trained numbers of one layer."""
        h, f = self.hidden_size, self.ffn_size
        qkv, fc1 = self.query_size + 2 * self.kv_size, f * (2 if self.gated else 1)
        weights = qkv * h + self.query_size * h + fc1 * h + f * h
        biases = (qkv if self.qkv_bias else 0) + (2 * h + fc1 if self.linear_bias else 0)
        heads = 2 * self.norm_tensors * self.head_dim if self.qk_layernorm else 0
        sinks = self.num_attention_heads if self.softmax_type == "learnable" else 0
        return weights + biases + 2 * self.norm_params() + heads + sinks
