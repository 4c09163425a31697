"""What a layer is made of, under Megatron-LM's names: norms, attention, MLP. Standard library
only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.config import execution
from trainyard.errors import ConfigError
from trainyard.models.config_positions import PositionOptions
from trainyard.models.config_sizes import ModelSizes, check_above_zero
from trainyard.models.layer_pattern import layer_pattern

Normalization = Literal["LayerNorm", "RMSNorm"]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "swiglu", "quick_geglu", "squared_relu"]


@dataclass(frozen=True, kw_only=True)
class NormOptions(ModelSizes):
    """Normalisation and what is dropped on the way."""

    normalization: Normalization = "LayerNorm"
    """Normalisation before attention, before the MLP and at the end."""
    norm_epsilon: float = 1e-5
    """Added to the variance inside a normalisation."""
    apply_layernorm_1p: bool = False
    """Keep the scale of a normalisation as its distance from 1."""
    norm_backend: Literal["auto", "torch", "apex", "transformer_engine"] = execution("auto")
    """Whose kernel normalises: torch's, apex's or Transformer Engine's (CUDA, where installed);
    auto: torch, whose operators --compile-layers fuses with what stands around them."""
    fp32_residual_connection: bool = False
    """Keep the residual stream between layers in fp32."""
    hidden_dropout: float = 0.1
    """Dropout after the embedding, attention and the MLP."""
    attention_dropout: float = 0.1
    """Dropout on attention weights."""

    def _check_norms(self) -> None:
        check_above_zero(self, "norm_epsilon")
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} must be in [0, 1), got {getattr(self, name)}")

    @property
    def norm_tensors(self) -> int:
        """Vectors that a normalisation learns."""
        return 2 if self.normalization == "LayerNorm" else 1


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(PositionOptions, NormOptions):
    """Self-attention beyond its sizes."""

    add_qkv_bias: bool = False
    """Keep the bias of the QKV projection where --disable-bias-linear drops the others."""
    qk_layernorm: bool = False
    """Normalise every query and key head."""
    window_size: str | None = None
    """How far a token sees, LEFT,RIGHT, itself not counted: 4095,0 sees 4096 tokens; -1 is no
    bound."""
    window_attn_skip_freq: str | None = None
    """Which layers ignore the window: N for every Nth, or a list with 1 for a window and 0 for
    none, such as [1,1,0] or ([1]*3+[0])*8."""
    softmax_type: SoftmaxType = "vanilla"
    """Softmax over the keys alone, or with one more that takes attention to nowhere: fixed
    (off-by-one) or learnt for each head."""
    attention_softmax_in_fp32: bool = False
    """Compute the softmax of unfused attention in fp32; fused kernels always do."""
    apply_query_key_layer_scaling: bool = False
    """Scale scores by 1 / layer number before the softmax and back inside it, against fp16
    overflow; softmax is then in fp32."""
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = execution("auto")
    """Kernel of attention: flash, fused (cuDNN), unfused, local (plain torch), or the fastest."""
    use_flash_attn: bool = execution(False)
    """The same as --attention-backend flash."""

    def _check_attention(self) -> None:
        if self.window_attn_skip_freq is not None and self.window_size is None:
            raise ConfigError(
                "--window-attn-skip-freq has no effect without --window-size; give both or none"
            )
        if self.use_flash_attn and self.attention_backend not in ("auto", "flash"):
            raise ConfigError(
                f"--use-flash-attn contradicts --attention-backend {self.attention_backend}; give "
                "one of them"
            )
        for layer in range(self.num_layers):
            self.attention_window(layer)

    def attention_window(self, layer: int) -> tuple[int, int] | None:
        """(left, right) reach of layer `layer`, counted from 0 over the whole model; -1: no bound;
        None where all keys are seen."""
        if self.window_size is None:
            return None
        if self.window_attn_skip_freq is not None:
            option = "--window-attn-skip-freq"
            if not layer_pattern(self.window_attn_skip_freq, self.num_layers, option)[layer]:
                return None
        return _window(self.window_size)


@dataclass(frozen=True, kw_only=True)
class MLPOptions(ModelSizes):
    """The feed-forward half of a layer, and the biases of linear layers."""

    swiglu: bool = False
    """Gated MLP, silu(gate) x up, in place of GELU."""
    quick_geglu: bool = False
    """Gated MLP, gate x sigmoid(1.702 gate) x up."""
    squared_relu: bool = False
    """relu(x)^2 in place of GELU."""
    quick_gelu: bool = False
    """x sigmoid(1.702 x) in place of GELU (CLIP)."""
    openai_gelu: bool = False
    """GELU in its tanh form, whatever the biases."""
    bias_gelu_fusion: bool = True
    """GELU in its tanh form where linear layers have biases, which the fused kernel upstream
    computes; without, and without biases, GELU is exact."""
    disable_bias_linear: bool = False
    """Leave the biases of linear layers out."""

    def _check_mlp(self) -> None:
        names = ("swiglu", "quick_geglu", "squared_relu", "quick_gelu", "openai_gelu")
        chosen = [name for name in names if getattr(self, name)]
        if len(chosen) > 1:
            options = " and ".join("--" + name.replace("_", "-") for name in chosen)
            raise ConfigError(f"{options} exclude each other; give one")

    @property
    def activation(self) -> Activation:
        """What stands between the matrices of the MLP."""
        if self.swiglu:
            return "swiglu"
        if self.quick_geglu:
            return "quick_geglu"
        if self.squared_relu:
            return "squared_relu"
        if self.quick_gelu:
            return "quick_gelu"
        fused = self.bias_gelu_fusion and not self.disable_bias_linear
        return "gelu_tanh" if fused or self.openai_gelu else "gelu"

    @property
    def gated(self) -> bool:
        """Whether the first matrix of the MLP is two, gate and up."""
        return self.swiglu or self.quick_geglu

    @property
    def ffn_size(self) -> int:
        """Width inside the MLP, given or derived."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.swiglu:
            return max(int(self.hidden_size * 8 / 3 / 64), 1) * 64
        return 4 * self.hidden_size

    @property
    def linear_bias(self) -> bool:
        """Whether linear layers other than QKV have a bias."""
        return not self.disable_bias_linear


def _window(text: str) -> tuple[int, int]:
    parts = text.strip().strip("()").split(",")
    try:
        left, right = (int(part) for part in parts)
    except ValueError:
        raise ConfigError(
            f"--window-size must be LEFT,RIGHT such as 4095,0, got {text!r}"
        ) from None
    if left < -1 or right not in (-1, 0):
        raise ConfigError(
            f"--window-size {text}: LEFT must be -1 (no bound) or more, and RIGHT 0, since a "
            "decoder sees nothing to the right"
        )
    return left, right
