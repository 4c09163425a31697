"""Refuses FP8 trainings that cannot be, before any work."""

from __future__ import annotations

from trainyard.errors import ConfigError
from trainyard.fp8.recipe import ALIGNMENT
from trainyard.models.config import TransformerConfig
from trainyard.optim.precision import PrecisionConfig
from trainyard.parallel.config import ParallelConfig


def check_fp8(
    model: TransformerConfig,
    precision: PrecisionConfig,
    parallel: ParallelConfig,
    micro_batch_size: int,
) -> None:
    """Raise ConfigError for sizes that 8-bit products cannot have, and for what they exclude."""
    if precision.fp8 is None:
        if parallel.data_parallel.fp8_param_gather:
            raise ConfigError("--fp8-param-gather needs --fp8-format; add it, or leave this out")
        return
    alignment = precision.fp8.alignment
    if parallel.tp_comm_overlap:
        raise ConfigError(
            "--tp-comm-overlap and --fp8-format: split products exist only in 16 bits; leave "
            "one of them out"
        )
    first, last = precision.bf16_layers
    deepest = max(model.num_layers, model.all_layers - model.num_layers)  # encoder or decoder
    if first + last >= deepest:
        raise ConfigError(
            f"--first-last-layers-bf16 keeps {first} + {last} layers in bfloat16, which leaves none"
            f" of {deepest} layers to --fp8-format; keep fewer "
            "(--num-layers-at-start-in-bf16, --num-layers-at-end-in-bf16) or leave --fp8-format out"
        )
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    of_a_rank = "" if tp == 1 else f" of a tensor-parallel rank (of {tp})"
    sizes = {
        "--hidden-size": (model.hidden_size, ""),
        **_of_attention(model, tp, of_a_rank),
        **_of_mlps(model, parallel, of_a_rank),
        **{name: (width // tp, of_a_rank) for name, width in model.other_products.items()},
    }
    of_a_part = "" if cp == 1 else f" of a context-parallel rank (of {cp})"
    for name, length in model.part_lengths.items():
        sizes[f"--micro-batch-size x {name}"] = (micro_batch_size * length // cp, of_a_part)
    for name, (size, where) in sizes.items():
        if size % alignment:
            option = "format" if alignment == ALIGNMENT else "recipe blockwise"
            raise ConfigError(
                f"{name}{where} is {size}, and --fp8-{option} needs a multiple of {alignment}"
            )


def _of_mlps(
    model: TransformerConfig, parallel: ParallelConfig, of_a_rank: str
) -> dict[str, tuple[int, str]]:
    """Widths inside dense MLPs, experts and shared experts, where a layer has them. How many rows
    an expert gets is free: they are filled up."""
    tp, etp, sizes = parallel.tensor_model_parallel_size, parallel.expert_tp, {}
    if not all(map(model.has_experts, model.trained_layers)):
        sizes["the width inside the MLP"] = (model.ffn_size // tp, of_a_rank)
    if model.experts.enabled:
        of_a_part = "" if etp == 1 else f" of a rank (--expert-tensor-parallel-size {etp})"
        sizes["the width inside an expert"] = (model.expert_ffn_size // etp, of_a_part)
        shared = model.experts.moe_shared_expert_intermediate_size or 0
        sizes["--moe-shared-expert-intermediate-size"] = (shared // tp, of_a_rank)
    return sizes


def _of_attention(model: TransformerConfig, tp: int, of_a_rank: str) -> dict[str, tuple[int, str]]:
    """Widths of the products of attention. Those that make latents stay in 16 bits."""
    latent = model.latent
    if not latent.enabled:
        qkv = model.query_size + 2 * model.kv_size
        return {
            "the width of queries, keys and values": (qkv // tp, of_a_rank),
            "the width of all query heads": (model.query_size // tp, of_a_rank),
        }
    made = model.num_attention_heads * (latent.qk_head_dim + latent.v_head_dim)
    return {
        "--kv-lora-rank": (latent.kv_lora_rank, ""),
        "--q-lora-rank": (latent.q_lora_rank or 0, ""),
        "the width of all query heads": (model.query_size // tp, of_a_rank),
        "the width of keys and values": (made // tp, of_a_rank),
        "the width of all value heads": (model.context_size // tp, of_a_rank),
    }
