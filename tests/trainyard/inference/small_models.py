"""Small models of every family that generates, for the laws of generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.trainyard.models.retro.small_retro import SMALL_RETRO
from trainyard.inference.decoders import CachedDecoder, Decoder, EncoderDecoder
from trainyard.inference.request import Request
from trainyard.inference.static import GenerationResult, run_requests
from trainyard.models.families import family_of
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.init import init_parameters
from trainyard.models.latent_config import LatentConfig
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.model import TransformerModel
from trainyard.models.moe_config import MoEConfig
from trainyard.models.pipeline_stage import WHOLE, PipelineStage
from trainyard.models.retro.config import RetroConfig
from trainyard.models.t5.config import T5Config
from trainyard.models.t5.model import T5Model
from trainyard.parallel.groups import ALONE, ProcessGroups
from trainyard.parallel.model import ALONE as ONE
from trainyard.parallel.model import ModelParallel

VOCAB, FIRST_TOKEN = 64, 1
SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 48,
    "init_method_std": 0.2,
}
LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "group_query_attention": True,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}
GPTS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": LLAMA,
    "mistral": LLAMA | {"window_size": "5,0"},
    "mixtral": LLAMA | {"moe": MoEConfig(num_experts=4, moe_router_topk=2)},
    "qwen": LLAMA | {"qk_layernorm": True, "add_qkv_bias": True, "softmax_type": "learnable"},
    "fp32 residual": {"fp32_residual_connection": True},
}
T5S: dict[str, dict[str, Any]] = {
    "t5": {},
    "google's t5": {
        "position_embedding_type": "relative",
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
        "normalization": "RMSNorm",
        "disable_bias_linear": True,
        "softmax_scale": 1.0,
        "geglu": True,
        "lm_head_bias": False,
    },
}
MAMBA: dict[str, Any] = {
    "position_embedding_type": "none",
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "mamba_state_dim": 8,
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
    "mamba_chunk_size": 8,
}
MAMBAS: dict[str, dict[str, Any]] = {
    "mamba": MAMBA,
    "hybrid": MAMBA | LLAMA | {"hybrid_layer_pattern": "M-M*"},
    "hybrid moe": MAMBA
    | {"hybrid_layer_pattern": "M*ME", "moe": MoEConfig(num_experts=4, moe_router_topk=2)},
}
KINDS = (*GPTS, *MAMBAS, *T5S, "retro")
LATENTS: dict[str, Any] = LLAMA | {
    "group_query_attention": False,
    "num_query_groups": 1,
    "qk_layernorm": True,
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 8,
    "yarn_mscale_all_dim": 1.0,
    "mla": LatentConfig(
        multi_latent_attention=True,
        q_lora_rank=12,
        kv_lora_rank=10,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=6,
    ),
}
MORE_GPTS: dict[str, dict[str, Any]] = {
    "deepseek": LATENTS | {"moe": MoEConfig(num_experts=4, moe_router_topk=2, moe_layer_freq="2")},
    "llama 4": LLAMA
    | {
        "qk_l2_norm": True,
        "rotary_interleaved": True,
        "moe": MoEConfig(
            num_experts=4,
            moe_router_topk=1,
            moe_router_score_function="sigmoid",
            moe_apply_probs_on_input=True,
            moe_shared_expert_intermediate_size=16,
        ),
    },
    "gpt-oss": GPTS["mixtral"]
    | {
        "softmax_type": "learnable",
        "window_size": "5,0",
        "window_attn_skip_freq": "2",
        "add_qkv_bias": True,
    },
}
"""Of tests that run few models."""


def config_of(kind: str) -> GPTConfig | T5Config:
    if kind in MAMBAS:
        return MambaConfig(**(SIZES | MAMBAS[kind]))
    if kind == "retro":
        return RetroConfig(**(SMALL_RETRO | {"seq_length": 48}))
    if (options := (GPTS | MORE_GPTS).get(kind)) is not None:
        return GPTConfig(**(SIZES | options))
    return T5Config(**(SIZES | {"decoder_num_layers": 2, "decoder_seq_length": 24} | T5S[kind]))


def build(
    kind: str, parallel: ModelParallel = ONE, stage: PipelineStage = WHOLE
) -> TransformerModel:
    config = config_of(kind)
    model: TransformerModel = family_of(config).load_class()(config, VOCAB, parallel, stage)
    init_parameters(model, 3)
    return model.eval()


def some_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def decoder_of(
    model: Any, prompts: Sequence[Sequence[int]], count: int, groups: ProcessGroups = ALONE
) -> Decoder:
    if isinstance(model, T5Model):
        return EncoderDecoder(model, len(prompts), count, FIRST_TOKEN, groups)
    return CachedDecoder(model, len(prompts), max(map(len, prompts)) + count, groups)


def run(
    model: Any,
    prompts: Sequence[Sequence[int]],
    count: int,
    groups: ProcessGroups = ALONE,
    **options: Any,
) -> GenerationResult:
    requests = [
        replace(Request(prompt=prompt, max_tokens=count, number=i), **options)
        for i, prompt in enumerate(prompts)
    ]
    return run_requests(decoder_of(model, prompts, count, groups), requests)


@torch.no_grad()
def full_logits(model: Any, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """(outputs + 1, V) before each token of an output and behind it, by the training's forward."""
    if isinstance(model, T5Model):
        logits = model(torch.tensor([list(prompt)]), torch.tensor([[FIRST_TOKEN, *output]]))
        return logits[0]
    logits = model(torch.tensor([[*prompt, *output]]))
    return logits[0, len(prompt) - 1 :]


def greedy_by_training(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The whole text again for every token."""
    output: list[int] = []
    for _ in range(count):
        output.append(int(full_logits(model, prompt, output)[-1].argmax()))
    return output
