"""Options of a Mamba-2 or of a hybrid with attention and MLPs. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from trainyard.config import (
    MAX_SIZE,
    also,
    check_above_zero,
    check_at_least,
    check_at_most,
    execution,
)
from trainyard.errors import ConfigError
from trainyard.models.config import ModelType
from trainyard.models.gpt.config import GPTConfig, check_own_layers
from trainyard.models.layer_costs import LayerCosts
from trainyard.models.mamba import costs
from trainyard.models.mamba import pattern as letters
from trainyard.models.mamba.pattern import ATTENTION, EXPERTS, MAMBA, MLP
from trainyard.models.param_counts import attention_params, mixture_params, mlp_params
from trainyard.models.state_shape import StateShape
from trainyard.parallel.config import CP, TP, ParallelConfig
from trainyard.parallel.divisible import divides

CONV_WIDTH = 4
"""Tokens that the convolution sees, its own included; fixed in Megatron-LM too."""

EXPANSION = 2
"""Width inside the mixer by the width of the residual stream, without --mamba-num-heads."""


@dataclass(frozen=True, kw_only=True)
class MambaConfig(GPTConfig):
    """Layers of one kind each: Mamba-2 (arXiv:2405.21060), and where the pattern says so attention
    (*), an MLP (-) or experts (E), as Megatron-LM's hybrid models (arXiv:2406.07887)."""

    model_type: ModelType = "mamba"
    hybrid_layer_pattern: str | None = also("hybrid_override_pattern", default=None)
    """A letter for each layer: M Mamba-2, * attention, - MLP, E experts. Unset: spread by
    --hybrid-attention-ratio and --hybrid-mlp-ratio."""
    hybrid_attention_ratio: float = 0.0
    """Share of the layers that are attention, without --hybrid-layer-pattern."""
    hybrid_mlp_ratio: float = 0.0
    """Share of the layers that are MLPs, without --hybrid-layer-pattern."""
    is_hybrid_model: bool = False
    """Divide the initial weights that add to the residual stream by the root of the number of
    layers, of which each adds once; otherwise by that of twice the number, as in a transformer."""
    mamba_state_dim: int = 128
    """Numbers of the state of each channel."""
    mamba_head_dim: int = 64
    """Channels of a head, which share one decay."""
    mamba_num_groups: int = 8
    """Groups of heads that share what is written to the state and read from it (B, C)."""
    mamba_num_heads: int | None = None
    """Heads of a layer; unset: twice the hidden size, in heads of --mamba-head-dim."""
    mamba_dt_min: float = 0.0
    """Shortest time step of a token."""
    mamba_dt_max: float | None = None
    """Longest time step of a token; unset: none."""
    mamba_chunk_size: int = execution(128)
    """Tokens that the scan takes as one matrix product; changes speed and memory alone."""
    mamba_backend: Literal["auto", "torch", "triton", "mamba_ssm"] = execution("auto")
    """Scan and convolution by torch, by our kernels in Triton, or by those of mamba-ssm and
    causal-conv1d; auto: the fastest that is available."""

    def __post_init__(self) -> None:
        """Raise ConfigError for options that contradict each other or cannot be built."""
        sizes = ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads")
        check_above_zero(self, *sizes, "mamba_chunk_size", "mamba_dt_max")
        check_at_most(self, MAX_SIZE, *sizes, "mamba_chunk_size")
        check_at_least(self, 0, "mamba_dt_min")
        check_own_layers(self)
        self._check_pattern()
        self._place_experts()
        self._check_heads()
        super().__post_init__()
        if self.mamba_dt_max is not None and self.mamba_dt_max <= self.mamba_dt_min:
            raise ConfigError(
                f"--mamba-dt-max ({self.mamba_dt_max}) must be above --mamba-dt-min "
                f"({self.mamba_dt_min})"
            )

    def _check_pattern(self) -> None:
        ratios = {
            "--hybrid-attention-ratio": self.hybrid_attention_ratio,
            "--hybrid-mlp-ratio": self.hybrid_mlp_ratio,
        }
        for option, ratio in ratios.items():
            if not 0.0 <= ratio <= 1.0:
                raise ConfigError(f"{option} must be from 0 to 1, got {ratio}")
        if sum(ratios.values()) > 1.0:
            raise ConfigError(
                f"{' and '.join(ratios)} ({' + '.join(map(str, ratios.values()))}) must be 1 at "
                "most in all"
            )
        given = self.hybrid_layer_pattern
        if given is None:
            return
        letters.check_pattern(given)
        if len(given) != self.num_layers:
            raise ConfigError(
                f"--hybrid-layer-pattern {given} has {len(given)} layers, and --num-layers says "
                f"{self.num_layers}; make them equal"
            )

    def _place_experts(self) -> None:
        """Say to --moe-layer-freq which layers the letters give experts."""
        has_experts = EXPERTS in self.layer_kinds
        if has_experts != self.moe.enabled:
            lacking = "--num-experts" if has_experts else f"an {EXPERTS} in --hybrid-layer-pattern"
            given = f"the {EXPERTS} of --hybrid-layer-pattern" if has_experts else "--num-experts"
            raise ConfigError(f"{given} needs {lacking}; give both or none")
        if has_experts:
            freq = [int(letter == EXPERTS) for letter in self.layer_kinds]
            moe = replace(self.moe, moe_layer_freq=str(freq).replace(" ", ""))
            object.__setattr__(self, "moe", moe)

    def _check_heads(self) -> None:
        h, d = self.hidden_size, self.mamba_head_dim
        if self.mamba_num_heads is None and (EXPANSION * h) % d:
            raise ConfigError(
                f"{EXPANSION} x --hidden-size ({EXPANSION * h}) must be divisible by "
                f"--mamba-head-dim ({d}); or give --mamba-num-heads"
            )
        divides("--mamba-num-heads", self.mamba_heads, "--mamba-num-groups", self.mamba_num_groups)

    def check_parallel(self, parallel: ParallelConfig) -> None:
        """Raise ConfigError for degrees of parallelism that this family has no model for."""
        super().check_parallel(parallel)
        tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        if MAMBA in self.layer_kinds:
            divides("--mamba-num-groups", self.mamba_num_groups, TP, tp)
        if cp > 1:
            raise ConfigError(
                f"{CP} ({cp}) does not apply with --model-type mamba, whose state passes through "
                f"the whole sequence on one rank; use {TP} with --sequence-parallel"
            )

    # --- derived values -------------------------------------------------------------------

    @property
    def layer_kinds(self) -> str:
        """The letter of each layer, given or spread by the ratios."""
        if self.hybrid_layer_pattern is not None:
            return self.hybrid_layer_pattern
        return letters.spread(self.num_layers, self.hybrid_attention_ratio, self.hybrid_mlp_ratio)

    def count(self, letter: str, layers: range | None = None) -> int:
        """Layers of a kind, of all or of these."""
        kinds = self.layer_kinds
        return (kinds if layers is None else kinds[layers.start : layers.stop]).count(letter)

    @property
    def mamba_heads(self) -> int:
        """Heads of a Mamba-2 layer, given or derived."""
        return self.mamba_num_heads or EXPANSION * self.hidden_size // self.mamba_head_dim

    @property
    def inner_size(self) -> int:
        """Width of all heads of a Mamba-2 layer together."""
        return self.mamba_heads * self.mamba_head_dim

    @property
    def group_size(self) -> int:
        """Width of B, and of C, of all groups together."""
        return self.mamba_num_groups * self.mamba_state_dim

    @property
    def projected_sizes(self) -> tuple[int, ...]:
        """Rows of in_proj: gate z, then x, B and C, which the convolution takes, and time steps."""
        di, gn = self.inner_size, self.group_size
        return di, di, gn, gn, self.mamba_heads

    @property
    def convolved_sizes(self) -> tuple[int, ...]:
        """Channels of the convolution: x, B and C."""
        return self.projected_sizes[1:4]

    def has_attention(self, layer: int) -> bool:
        """Whether layer `layer` is self-attention."""
        return self.layer_kinds[layer] == ATTENTION

    def state_shapes(self, layer: int, tp: int = 1) -> tuple[StateShape, ...]:
        """Of a Mamba layer: the last inputs of the convolution, (w - 1, di + 2 g n), and the state
        of each head, (g, r, p, n) as in `mixer`."""
        if self.layer_kinds[layer] != MAMBA:
            return ()
        groups = self.mamba_num_groups
        heads = (groups // tp, self.mamba_heads // groups, self.mamba_head_dim)
        return (
            StateShape((CONV_WIDTH - 1, sum(self.convolved_sizes) // tp)),
            StateShape((*heads, self.mamba_state_dim), is_fp32=True),
        )

    @property
    def other_products(self) -> Mapping[str, int]:
        """Of both projections of a Mamba layer."""
        if MAMBA not in self.layer_kinds:
            return {}
        return {
            "the width of what a Mamba layer projects": sum(self.projected_sizes),
            "the width of the heads of a Mamba layer": self.inner_size,
        }

    def layer_costs(self, layers: range) -> tuple[LayerCosts, ...]:
        """What each of these layers costs, by its letter."""
        of_kind = {letter: costs.layer_costs(self, letter) for letter in set(self.layer_kinds)}
        return tuple(of_kind[self.layer_kinds[layer]] for layer in layers)

    @property
    def residual_branches(self) -> int:
        """Every layer adds once; without --is-hybrid-model counted twice, as Megatron-LM does."""
        return self.num_layers if self.is_hybrid_model else 2 * self.num_layers

    # --- parameters -----------------------------------------------------------------------

    def all_layer_params(self) -> int:
        """Of all layers, each with one norm."""
        return sum(self.kind_params(letter) * self.count(letter) for letter in letters.KINDS)

    def kind_params(self, letter: str) -> int:
        """Trained parameters of a layer of a kind, with its norm."""
        inside = {
            MAMBA: self.mixer_params(),
            ATTENTION: attention_params(self),
            MLP: mlp_params(self, self.ffn_size),
            EXPERTS: mixture_params(self),
        }
        return inside[letter] + self.norm_params()

    def mixer_params(self) -> int:
        """Of a Mamba-2 mixer: both projections, the convolution with its bias, A, D and the bias of
        the time steps of each head, and the gated norm."""
        h, di = self.hidden_size, self.inner_size
        convolved = di + 2 * self.group_size
        matrices = sum(self.projected_sizes) * h + di * h
        return matrices + convolved * (CONV_WIDTH + 1) + 3 * self.mamba_heads + di
