"""Options of a mixture of experts, under Megatron-LM's names, and their rules with other options.
Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trainyard.config import (
    MAX_SIZE,
    check_above_zero,
    check_at_least,
    check_at_most,
    execution,
    flag,
)
from trainyard.errors import ConfigError
from trainyard.models.layer_pattern import every_nth
from trainyard.parallel.config import EP, ETP, TP, ParallelConfig
from trainyard.parallel.divisible import divides

LoadBalancing = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"]
ScoreFunction = Literal["softmax", "sigmoid"]

MAX_EXPERTS = 4096
"""Every step adds up a number for each expert of each layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Experts in place of the MLP of a layer, and the router that chooses among them."""

    num_experts: int | None = None
    """Experts of each mixture; unset: a dense model."""
    moe_layer_freq: str = "1"
    """Which layers have experts: N for every Nth from the first on, or a list with 1 for experts
    and 0 for a dense MLP, such as [0,1,1] or [0]*3+[1]*58."""
    moe_router_topk: int = 2
    """Experts that a token visits."""
    moe_ffn_hidden_size: int | None = None
    """Width inside an expert; unset: --ffn-hidden-size."""
    moe_shared_expert_intermediate_size: int | None = None
    """Width of an additional expert that every token visits; unset: no such expert."""
    moe_shared_expert_gate: bool = False
    """Weight the shared expert by a sigmoid of the token (Qwen2-MoE)."""
    moe_router_score_function: ScoreFunction = "softmax"
    """Score of an expert: softmax over the experts, or sigmoid of each (DeepSeek-V3)."""
    moe_router_pre_softmax: bool = False
    """Softmax over all experts before the choice, whose scores then sum to less than 1; otherwise
    over the chosen ones."""
    moe_router_topk_scaling_factor: float | None = None
    """Factor of the scores of the chosen experts."""
    moe_apply_probs_on_input: bool = False
    """Multiply a token by its weight before the expert in place of after it (Llama 4); with
    --moe-router-topk 1."""
    moe_router_num_groups: int | None = None
    """Number of groups of experts; a token visits only some of them (DeepSeek-V3)."""
    moe_router_group_topk: int | None = None
    """Groups that a token visits."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Precision of the router's product and scores; unset: the model's, with softmax in fp32."""
    moe_router_load_balancing_type: LoadBalancing = "aux_loss"
    """What the auxiliary loss balances the experts over: a micro-batch (aux_loss), each sequence
    (seq_aux_loss), or the step so far on all replicas (global_aux_loss); none: no such loss."""
    moe_aux_loss_coeff: float = 0.0
    """Factor of the auxiliary loss (Switch Transformer, arXiv:2101.03961, section 2.2)."""
    moe_z_loss_coeff: float | None = None
    """Factor of the z-loss, which keeps the router's logits small (ST-MoE, arXiv:2202.08906)."""
    moe_router_enable_expert_bias: bool = False
    """Balance by a bias on the scores that decide the choice, adjusted after every step in favour
    of experts with fewer tokens (arXiv:2408.15664); with --moe-router-score-function sigmoid."""
    moe_router_bias_update_rate: float = 1e-3
    """Step size of the bias of --moe-router-enable-expert-bias."""
    moe_expert_capacity_factor: float | None = None
    """Limit on the tokens that an expert takes from one rank, as a multiple of an even share;
    further tokens skip the expert. Unset: no limit."""
    moe_pad_expert_input_to_capacity: bool = False
    """Pad every expert's input to its capacity, so that shapes never change."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """Tokens that an expert beyond capacity drops: those with the lowest scores, or the last."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = execution("allgather")
    """How tokens reach experts of other ranks: every rank gathers all tokens, or sends each to its
    experts only."""
    moe_grouped_gemm: bool = execution(False)
    """Multiply all experts in one kernel where the device has one (CUDA, bf16); otherwise, and in
    FP8, one after the other."""

    def __post_init__(self) -> None:
        """Raise ConfigError for impossible combinations."""
        if self.num_experts is None:
            return
        sizes = ("num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
        check_above_zero(self, *sizes, "moe_router_topk_scaling_factor")
        check_above_zero(self, "moe_expert_capacity_factor", "moe_router_bias_update_rate")
        check_at_least(self, 0, "moe_aux_loss_coeff", "moe_z_loss_coeff")
        check_at_most(self, MAX_EXPERTS, "num_experts")
        check_at_most(self, MAX_SIZE, *sizes[1:])
        self._check_router(self.num_experts)
        if self.moe_pad_expert_input_to_capacity and self.moe_expert_capacity_factor is None:
            raise ConfigError(
                "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor; give both "
                "or none"
            )
        if self.moe_shared_expert_gate and self.moe_shared_expert_intermediate_size is None:
            raise ConfigError(
                "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size; give both "
                "or none"
            )

    def _check_router(self, num_experts: int) -> None:
        topk, score = self.moe_router_topk, self.moe_router_score_function
        if not 0 < topk <= num_experts:
            raise ConfigError(
                f"--moe-router-topk ({topk}) must be from 1 to --num-experts ({num_experts})"
            )
        if topk == 1 and score == "softmax" and not self.moe_router_pre_softmax:
            raise ConfigError(
                "--moe-router-topk 1: a softmax over the one chosen expert is always 1, and the "
                "router would learn nothing; add --moe-router-pre-softmax"
            )
        if self.moe_apply_probs_on_input and topk != 1:
            raise ConfigError(
                f"--moe-apply-probs-on-input needs --moe-router-topk 1, which is {topk}; give 1, "
                "or leave the flag out"
            )
        if score == "sigmoid" and self.moe_router_pre_softmax:
            raise ConfigError(
                "--moe-router-pre-softmax has no meaning with --moe-router-score-function sigmoid; "
                "leave it out"
            )
        if self.moe_router_enable_expert_bias and score != "sigmoid":
            raise ConfigError(
                "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid, since "
                "the bias moves scores between 0 and 1; or balance by --moe-aux-loss-coeff"
            )
        self._check_groups(num_experts)

    def _check_groups(self, num_experts: int) -> None:
        groups, chosen = self.moe_router_num_groups, self.moe_router_group_topk
        if (groups is None) != (chosen is None):
            raise ConfigError(
                "--moe-router-num-groups and --moe-router-group-topk belong together; give both or "
                "none"
            )
        if groups is None or chosen is None:
            return
        check_above_zero(self, "moe_router_num_groups", "moe_router_group_topk")
        topk = self.moe_router_topk
        if num_experts % groups or chosen > groups or topk % chosen:
            raise ConfigError(
                f"--moe-router-num-groups ({groups}) must divide --num-experts ({num_experts}), "
                f"and --moe-router-group-topk ({chosen}) must be at most that and divide "
                f"--moe-router-topk ({topk})"
            )
        if topk // chosen > num_experts // groups:
            raise ConfigError(
                f"--moe-router-topk ({topk}) / --moe-router-group-topk ({chosen}) must be at most "
                f"the {num_experts // groups} experts of a group"
            )

    @property
    def enabled(self) -> bool:
        """Whether the model has experts."""
        return self.num_experts is not None

    def pattern(self, num_layers: int) -> tuple[bool, ...]:
        """For each layer whether it has experts."""
        if not self.enabled:
            return (False,) * num_layers
        return every_nth(self.moe_layer_freq, num_layers, flag("moe_layer_freq"))


DENSE = MoEConfig()


def check_layers(config: Any) -> None:
    """Raise ConfigError for a model with experts of which no layer has any."""
    moe = config.experts
    if moe.enabled and not any(moe.pattern(config.num_layers)):
        raise ConfigError(
            f"--moe-layer-freq {moe.moe_layer_freq} gives experts to no layer; leave --num-experts "
            "out for a dense model"
        )


def check_expert_parallel(config: Any, parallel: ParallelConfig) -> None:
    """Raise ConfigError for degrees of parallelism that do not divide the experts."""
    moe, tp = config.experts, parallel.tensor_model_parallel_size
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    if moe.num_experts is None:
        if ep > 1 or etp not in (None, 1, tp):  # Megatron-LM's commands for dense models say 1
            given = f"{EP} ({ep})" if ep > 1 else f"{ETP} ({etp})"
            raise ConfigError(
                f"{given} spreads experts over ranks, and the model has none; leave it out, or "
                "give --num-experts"
            )
        return
    if tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"--num-experts with {TP} ({tp}) needs --sequence-parallel, so that each rank routes "
            "tokens of its own; add it"
        )
    divides("--num-experts", moe.num_experts, EP, ep)
    is_own = moe.moe_ffn_hidden_size is not None
    width = "--moe-ffn-hidden-size" if is_own else "--ffn-hidden-size"
    divides(width, config.expert_ffn_size, TP if etp is None else ETP, parallel.expert_tp)
    shared = moe.moe_shared_expert_intermediate_size
    if shared is not None:
        divides("--moe-shared-expert-intermediate-size", shared, TP, tp)
