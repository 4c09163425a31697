"""Options of a transformer, under Megatron-LM's names, and the numbers that follow from them.

Shared by all model families. Standard library only: `stages.plan` and the command lines read it
without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from trainyard.config import also, execution
from trainyard.errors import ConfigError
from trainyard.models.attention_sizes import AttentionSizes, PositionEmbeddingType
from trainyard.models.config_checks import CHECKS, check_params
from trainyard.models.latent_config import check_latents
from trainyard.models.layer_costs import LayerCosts
from trainyard.models.layer_pattern import window_of_layer
from trainyard.models.moe_config import DENSE, MoEConfig, check_expert_parallel, check_layers
from trainyard.models.mtp_config import NO_MTP, MTPConfig, check_mtp, check_mtp_layout
from trainyard.models.param_counts import attention_params, mixture_params, mlp_params
from trainyard.models.state_shape import StateShape
from trainyard.parallel.config import ParallelConfig

LLAMA3_LENGTH = 8192
"""Original length that Llama 3.1 scales from; fixed in the code of Meta and Megatron-LM."""

Normalization = Literal["LayerNorm", "RMSNorm"]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
Ungated = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu"]
Activation = Ungated | Literal["swiglu", "quick_geglu", "geglu_tanh"]
RecomputeGranularity = Literal["none", "selective", "full"]
RecomputeModule = Literal["core_attn", "mlp", "layernorm"]
ModelType = Literal["gpt", "bert", "t5", "retro", "mamba"]
"""The families, by their names in `models/families.py`."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(AttentionSizes):
    """A stack of transformer layers: sizes, norms, positions, attention, MLP, memory."""

    RELATIVE_POSITIONS: ClassVar[bool] = False
    """Whether the family has --position-embedding-type relative."""

    model_type: ModelType = "gpt"
    """Family of the model. gpt predicts the next token, bert the hidden words of sentences; t5
    spells hidden words out. retro predicts the next token with the help of retrieved text; mamba
    with a state of fixed size in place of attention, or with both."""
    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the residual stream."""
    num_attention_heads: int
    """Query heads of each layer."""
    ffn_hidden_size: int | None = None
    """Width inside the MLP; unset: 4 x hidden size, with --swiglu 8/3 of it in steps of 64."""
    kv_channels: int | None = None
    """Width of one attention head; unset: hidden size / attention heads."""
    group_query_attention: bool = False
    """Let several query heads share one key and value head."""
    num_query_groups: int = 1
    """Key and value heads under --group-query-attention."""
    seq_length: int
    """Tokens of a training sample."""
    make_vocab_size_divisible_by: int = 128
    """Pad the vocabulary to a multiple of this, times the tensor-parallel size."""

    normalization: Normalization = "LayerNorm"
    """Normalisation before attention, before the MLP and at the end."""
    norm_epsilon: float = 1e-5
    """Added to the variance inside a normalisation."""
    apply_layernorm_1p: bool = False
    """Store the scale of a normalisation as its distance from 1."""
    norm_backend: Literal["auto", "torch", "apex", "transformer_engine"] = execution("auto")
    """Normalisation kernel: torch's, apex's or Transformer Engine's (CUDA, where installed);
    auto: torch, whose operators --compile-layers fuses with their neighbours, with trainyard's
    backward pass on CUDA."""
    fp32_residual_connection: bool = False
    """Keep the residual stream between layers in fp32."""
    hidden_dropout: float = 0.1
    """Dropout after the embedding, attention and the MLP."""
    attention_dropout: float = 0.1
    """Dropout on attention weights."""

    max_position_embeddings: int | None = None
    """Longest sequence that has positions; unset: the sequence length."""
    position_embedding_type: PositionEmbeddingType = "learned_absolute"
    """A learned table, rotary embedding (rope), rotary embedding stretched by YaRN (yarn), for T5
    a learned score of every distance between tokens (relative), or none."""
    rotary_base: float = 10000.0
    """Base of the rotary wavelengths (theta)."""
    rotary_percent: float = 1.0
    """Share of each head's channels that rotate."""
    rotary_interleaved: bool = False
    """Rotate neighbouring channels together (RoFormer); otherwise channel i with i + half."""
    rotary_seq_len_interpolation_factor: float | None = None
    """Divide positions by this before rotation (linear interpolation)."""
    use_rope_scaling: bool = False
    """Stretch long wavelengths as Llama 3.1 does."""
    rope_scaling_factor: float = 8.0
    """Stretch factor of --use-rope-scaling."""
    rope_scaling_original_max_position_embeddings: int = LLAMA3_LENGTH
    """Training length before --use-rope-scaling; Megatron-LM knows no other value."""
    yarn_rotary_scaling_factor: float = also("rotary_scaling_factor", default=1.0)
    """Stretch factor of YaRN (arXiv:2309.00071), with --multi-latent-attention of rope too."""
    yarn_original_max_position_embeddings: int = also(
        "original_max_position_embeddings", default=4096
    )
    """Training length before YaRN."""
    yarn_beta_fast: float = also("beta_fast", default=32.0)
    """Channels that turn more often than this over the original length are not stretched."""
    yarn_beta_slow: float = also("beta_slow", default=1.0)
    """Channels that turn less often than this over the original length are fully stretched."""
    yarn_mscale: float = also("mscale", default=1.0)
    """Growth of attention with the logarithm of the scaling factor."""
    yarn_mscale_all_dim: float = also("mscale_all_dim", default=0.0)
    """Growth that is divided out again."""
    yarn_correction_range_round_to_int: bool = True
    """Round the bounds between kinds of channels to whole channels."""

    add_qkv_bias: bool = False
    """Keep the bias of the QKV projection where --disable-bias-linear drops the others."""
    qk_layernorm: bool = False
    """Normalise every query and key head."""
    qk_l2_norm: bool = False
    """Divide every query and key head by the root of its mean square, without weights (Llama 4);
    replaces --qk-layernorm."""
    window_size: str | None = None
    """Attention window LEFT,RIGHT without the token itself: 4095,0 sees 4096 tokens; -1 is no
    bound."""
    window_attn_skip_freq: str | None = None
    """Which layers ignore the window: N for every Nth, or a list with 1 for a window and 0 for
    none, such as [1,1,0] or ([1]*3+[0])*8."""
    softmax_type: SoftmaxType = "vanilla"
    """Softmax over the keys alone, or with one more key of value 0 whose score is fixed
    (off-by-one) or learnt for each head (learnable)."""
    attention_softmax_in_fp32: bool = False
    """Compute the softmax of unfused attention in fp32; fused kernels always do."""
    apply_query_key_layer_scaling: bool = False
    """Scale scores by 1 / layer number before the softmax and back inside it, against fp16
    overflow; softmax is then in fp32."""
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = execution("auto")
    """Attention kernel: flash, fused (cuDNN), unfused, local (plain torch), or the fastest."""
    use_flash_attn: bool = execution(False)
    """The same as --attention-backend flash."""

    swiglu: bool = False
    """Gated MLP, silu(gate) x up, in place of GELU."""
    quick_geglu: bool = False
    """Gated MLP, gate x sigmoid(1.702 gate) x up."""
    activation_func_clamp_value: float | None = None
    """With --quick-geglu: clamp gates to at most this, and ups to at most this in magnitude
    (gpt-oss); unset: no clamping."""
    glu_linear_offset: float = 0.0
    """With --quick-geglu: added to the ups before the product with the gates (gpt-oss: 1)."""
    squared_relu: bool = False
    """relu(x)^2 in place of GELU."""
    quick_gelu: bool = False
    """x sigmoid(1.702 x) in place of GELU (CLIP)."""
    openai_gelu: bool = False
    """GELU in its tanh form, with or without biases."""
    bias_gelu_fusion: bool = True
    """GELU in its tanh form where linear layers have biases, as Megatron-LM's fused kernel
    computes it; without, and without biases, GELU is exact."""
    disable_bias_linear: bool = False
    """Leave the biases of linear layers out."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output layer its own weights."""

    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""
    embedding_init_method_std: float | None = None
    """Standard deviation of the embeddings; unset: --init-method-std."""
    init_method_xavier_uniform: bool = False
    """Draw the matrices of the layers uniformly, by Xavier's rule."""

    recompute_granularity: Literal["none", "selective", "full"] = execution("none")
    """Activations to recompute in the backward pass: those of some modules (selective) or of
    whole layers (full)."""
    recompute_activations: bool = execution(False)
    """The same as --recompute-granularity selective."""
    recompute_modules: tuple[RecomputeModule, ...] = execution(("core_attn",))
    """Modules that selective recomputation covers."""
    recompute_method: Literal["uniform", "block"] | None = execution(None)
    """Full recomputation of all layers in groups (uniform), or of the first ones of each stage
    (block); unset: uniform."""
    recompute_num_layers: int | None = execution(None)
    """uniform: layers of a group, of which only the input is kept; block: layers of each stage
    that are recomputed. Unset: 1."""
    cpu_offloading_num_layers: int = execution(0)
    """Number of layers of each stage, from the first on, that keep their activations in host
    memory."""

    def __post_init__(self) -> None:
        """Raise ConfigError for options that contradict each other or cannot be built."""
        own = type(self).model_type
        if self.model_type != own:
            raise ConfigError(f"--model-type {self.model_type}: these are the options of {own}")
        for check in (check_latents, *CHECKS, check_layers, check_mtp):
            check(self)
        check_params(self, self.make_vocab_size_divisible_by)

    # --- parameters -----------------------------------------------------------------------

    def num_params(self, padded_vocab_size: int) -> int:
        """Exact number of trained parameters: what `parameters()` of the model sums to."""
        h = self.hidden_size
        tables = 2 if self.untie_embeddings_and_output_weights else 1
        ends = self.embedding_params() + self.output_params(padded_vocab_size)
        return tables * padded_vocab_size * h + self.all_layer_params() + ends

    def embedding_params(self) -> int:
        """Trained parameters of the embedding beside the table of the vocabulary."""
        learned = self.position_embedding_type == "learned_absolute"
        return self.positions * self.hidden_size if learned else 0

    def output_params(self, rows: int) -> int:
        """Trained parameters behind the layers, without a table of which a rank has `rows`."""
        joins = 2 * self.hidden_size**2 + 3 * self.norm_params()  # of a depth, beside its layer
        return self.norm_params() + (self.mtp.mtp_num_layers or 0) * joins

    def all_layer_params(self) -> int:
        """Trained parameters of all layers."""
        mixtures = sum(map(self.has_experts, self.trained_layers))
        more = mixture_params(self) - mlp_params(self, self.ffn_size) if mixtures else 0
        return len(self.trained_layers) * self.layer_params() + mixtures * more

    def layer_params(self) -> int:
        """Trained parameters of one layer with a dense MLP."""
        inside = attention_params(self) + mlp_params(self, self.ffn_size)
        return inside + 2 * self.norm_params()

    @property
    def norm_tensors(self) -> int:
        """Vectors that a normalisation learns."""
        return 2 if self.normalization == "LayerNorm" else 1

    def norm_params(self) -> int:
        """Trained parameters of one normalisation of the residual stream."""
        return self.norm_tensors * self.hidden_size

    # --- derived values -------------------------------------------------------------------

    @property
    def experts(self) -> MoEConfig:
        """Options of mixtures of experts; most families have none."""
        return DENSE

    @property
    def mtp(self) -> MTPConfig:
        """Options of multi-token prediction; most families have none."""
        return NO_MTP

    @property
    def trained_layers(self) -> range:
        """Numbers of all layers: those of the model, then those of multi-token prediction."""
        return range(self.num_layers + (self.mtp.mtp_num_layers or 0))

    def has_experts(self, layer: int) -> bool:
        """Whether layer `layer`, counted from 0 over the whole model, has experts; those of
        multi-token prediction are as the last one."""
        if not self.experts.enabled:
            return False
        return self.experts.pattern(self.num_layers)[min(layer, self.num_layers - 1)]

    @property
    def expert_ffn_size(self) -> int:
        """Width inside an expert."""
        return self.experts.moe_ffn_hidden_size or self.ffn_size

    @property
    def all_layers(self) -> int:
        """Layers that pipeline stages share."""
        return self.num_layers

    @property
    def stream_length(self) -> int:
        """Tokens of a sample whose hidden states pass from stage to stage."""
        return self.seq_length

    @property
    def part_lengths(self) -> Mapping[str, int]:
        """Tokens of each part of a sample that has layers of its own, by its option."""
        return {"--seq-length": self.seq_length}

    @property
    def output_length(self) -> int:
        """Tokens of a sample with logits."""
        return self.seq_length

    @property
    def residual_branches(self) -> int:
        """How many add to the residual stream; its root divides their initial weights (GPT-2)."""
        return 2 * self.num_layers

    def has_attention(self, layer: int) -> bool:
        """Whether layer `layer`, counted from 0 over the whole model, has self-attention."""
        return True

    def state_shapes(self, layer: int, tp: int = 1) -> tuple[StateShape, ...]:
        """What layer `layer` keeps of each text in place of keys and values, on one of tp ranks."""
        return ()

    @property
    def other_products(self) -> Mapping[str, int]:
        """Widths of matrix products other than those of attention and MLPs, by name."""
        return {}

    def layer_costs(self, layers: range) -> tuple[LayerCosts, ...]:
        """What each of these costs, in place of other estimates, where they are of other kinds."""
        return ()

    def num_cross_layers(self, layers: range) -> int:
        """How many of these layers attend to another sequence as well."""
        return 0

    def num_inner_layers(self, layers: range) -> int:
        """Layers of modules inside of these, such as an encoder of neighbours."""
        return 0

    def equal_layers(self, layers: range) -> float:
        """Layers over all tokens that cost as much as these, for estimates."""
        return float(len(layers))

    def cross_params(self) -> int:
        """Trained parameters of the cross-attention of a layer and its norm."""
        return 0

    def padded_vocab_size(self, vocab_size: int, tensor_parallel_size: int = 1) -> int:
        """Rows of the embedding for a tokenizer of `vocab_size` tokens."""
        multiple = self.make_vocab_size_divisible_by * tensor_parallel_size
        return -(-vocab_size // multiple) * multiple

    @property
    def positions(self) -> int:
        """Longest sequence the model can see."""
        return self.max_position_embeddings or self.seq_length

    def attention_window(self, layer: int) -> tuple[int, int] | None:
        """(left, right) reach of layer `layer`, counted from 0 over the whole model; -1: no bound;
        None: the layer sees all keys. Layers of multi-token prediction are as the last one."""
        layer = min(layer, self.num_layers - 1)
        return window_of_layer(self.window_size, self.window_attn_skip_freq, self.num_layers, layer)

    @property
    def activation(self) -> Activation:
        """Function between the matrices of the MLP."""
        if self.swiglu:
            return "swiglu"
        if self.quick_geglu:
            return "quick_geglu"
        if self.squared_relu:
            return "squared_relu"
        if self.quick_gelu:
            return "quick_gelu"
        fused = self.bias_gelu_fusion and self.linear_bias
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

    @property
    def qkv_bias(self) -> bool:
        """Whether the QKV projection has a bias."""
        return self.linear_bias or self.add_qkv_bias

    @property
    def recompute(self) -> RecomputeGranularity:
        """What the backward pass recomputes."""
        return "selective" if self.recompute_activations else self.recompute_granularity

    def recomputes(self, module: RecomputeModule) -> bool:
        """Whether a layer recomputes this module selectively."""
        return self.recompute == "selective" and module in self.recompute_modules

    def check_parallel(self, parallel: ParallelConfig) -> None:
        """Raise ConfigError for degrees of parallelism that this family has no model for."""
        check_expert_parallel(self, parallel)
        check_mtp_layout(self, parallel)
