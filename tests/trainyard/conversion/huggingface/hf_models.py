"""Small random models of `transformers`, as folders that it saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.trainyard.checkpoint.samples import END, tokenizer_files
from trainyard.tokenizers.carried import DESCRIPTION

VOCAB = 320
LENGTH = 24

LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
QWEN3_MOE: dict[str, Any] = {
    **LLAMA,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
DEEPSEEK: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
DEEPSEEK_V3: dict[str, Any] = {**DEEPSEEK, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0}
GPT_OSS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "swiglu_limit": 0.4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
DEEPSEEK_YARN = {**YARN, "mscale": 0.9, "mscale_all_dim": 0.7, "beta_fast": 16.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama for training": ("LlamaConfig", {**LLAMA, "vocab_size": 1024}),
    "tiny vocabulary": ("LlamaConfig", {**LLAMA, "vocab_size": 200}),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", LLAMA),
    "llama tied": ("LlamaConfig", {**LLAMA, "tie_word_embeddings": True}),
    "llama wide heads": ("LlamaConfig", {**LLAMA, "head_dim": 16, "num_key_value_heads": 4}),
    "llama linear": (
        "LlamaConfig",
        {
            **LLAMA,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 2.0},
        },
    ),
    "llama 3.2": ("LlamaConfig", {**LLAMA, "rope_parameters": LLAMA3}),
    **{
        f"llama 3.2 from {length}": (
            "LlamaConfig",
            {
                **LLAMA,
                "rope_parameters": {**LLAMA3, "original_max_position_embeddings": length},
            },
        )
        for length in (16, 4096, 16384)
    },
    "llama yarn": ("LlamaConfig", {**LLAMA, "rope_parameters": YARN}),
    "llama yarn gain": (
        "LlamaConfig",
        {**LLAMA, "rope_parameters": {**YARN, "attention_factor": 1.3, "truncate": False}},
    ),
    "mistral": ("MistralConfig", {**LLAMA, "sliding_window": 8}),
    "mistral no window": ("MistralConfig", {**LLAMA, "sliding_window": None}),
    "qwen2": ("Qwen2Config", {**LLAMA, "tie_word_embeddings": True}),
    "qwen2 some windows": (
        "Qwen2Config",
        {**LLAMA, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {**LLAMA, "head_dim": 16}),
    "mixtral": ("MixtralConfig", {**LLAMA, "num_local_experts": 4}),
    "mixtral with a window": (
        "MixtralConfig",
        {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 8},
    ),
    "qwen3 moe": ("Qwen3MoeConfig", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3 moe, dense between": (
        "Qwen3MoeConfig",
        {**QWEN3_MOE, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    ),
    "deepseek v3": ("DeepseekV3Config", {**DEEPSEEK_V3, "rope_parameters": DEEPSEEK_YARN}),
    "deepseek v3 plain": (
        "DeepseekV3Config",
        {**DEEPSEEK_V3, "n_group": 1, "topk_group": 1, "q_lora_rank": None, "v_head_dim": 16},
    ),
    "deepseek v3 one scale": (
        "DeepseekV3Config",
        {**DEEPSEEK_V3, "rope_parameters": {**YARN, "mscale_all_dim": 0.7}},
    ),
    "deepseek v2": (
        "DeepseekV2Config",
        {**DEEPSEEK, "num_experts_per_tok": 3, "rope_parameters": DEEPSEEK_YARN},
    ),
    "gpt-oss": ("GptOssConfig", GPT_OSS),
    "gpt-oss without windows": (
        "GptOssConfig",
        {
            **GPT_OSS,
            "num_key_value_heads": 4,
            "swiglu_limit": 1.0,
            "layer_types": ["full_attention"] * 3,
        },
    ),
    "gpt2": ("GPT2Config", GPT2),
    "gpt2 quick gelu": ("GPT2Config", {**GPT2, "activation_function": "quick_gelu"}),
    "gpt2 exact gelu": ("GPT2Config", {**GPT2, "activation_function": "gelu", "n_inner": 80}),
}


def make(name: str, folder: Path, seed: int = 1, **saving: Any) -> Any:
    """Save a random model of `MODELS` or `OTHERS` with a tokenizer; returns it, ready to compute.

    No parameter is 0 or 1, so that a swapped one is seen."""
    import transformers

    kind, options = {**MODELS, **OTHERS}[name]
    config = getattr(transformers, kind)(**options)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn(buffer.shape) * 0.1)
    model.eval().save_pretrained(folder, **saving)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 257 tokens."""
    for path, data in tokenizer_files().items():
        name = path.removeprefix("tokenizer/")
        if name != DESCRIPTION:
            (folder / name).write_bytes(data)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "!",
        "eos_token": END,
        "model_max_length": 64,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def some_tokens() -> torch.Tensor:
    """(2, s) ids."""
    return torch.randint(0, 257, (2, LENGTH), generator=torch.Generator().manual_seed(0))
