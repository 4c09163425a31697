"""The same weights in transformers' GPT-2 and Llama give the same logits."""

from __future__ import annotations

import pytest
import torch

from trainyard.models.config import GPTConfig
from trainyard.models.gpt import GPTModel
from trainyard.models.init import init_parameters

transformers = pytest.importorskip("transformers")

SAME_LOGITS = {"rtol": 1e-4, "atol": 2e-5}
VOCAB = 96


def perturbed(config: GPTConfig) -> GPTModel:
    """A model whose biases and norms differ from their first values, so that each is seen to
    count."""
    model = GPTModel(config, VOCAB)
    init_parameters(model, 5)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def to_gpt2(model: GPTModel) -> dict[str, torch.Tensor]:
    """Megatron rows [q k v] per head to GPT-2's columns [all q, all k, all v]."""
    state, config = model.state_dict(), model.config
    out = {
        "transformer.wte.weight": state["embedding.word_embeddings.weight"],
        "transformer.wpe.weight": state["embedding.position_embeddings.weight"],
        "transformer.ln_f.weight": state["decoder.final_layernorm.weight"],
        "transformer.ln_f.bias": state["decoder.final_layernorm.bias"],
        "lm_head.weight": state["embedding.word_embeddings.weight"],
    }
    for i in range(config.num_layers):
        ours, theirs = f"decoder.layers.{i}.", f"transformer.h.{i}."
        for a, b in [("input_layernorm", "ln_1"), ("pre_mlp_layernorm", "ln_2")]:
            for part in ("weight", "bias"):
                out[f"{theirs}{b}.{part}"] = state[f"{ours}{a}.{part}"]
        for part in ("weight", "bias"):
            qkv = state[f"{ours}self_attention.linear_qkv.{part}"]
            heads = qkv.view(config.num_attention_heads, 3, config.head_dim, -1)
            rows = heads.transpose(0, 1).reshape(qkv.shape)
            out[f"{theirs}attn.c_attn.{part}"] = rows.t() if part == "weight" else rows
        for a, b in [
            ("self_attention.linear_proj", "attn.c_proj"),
            ("mlp.linear_fc1", "mlp.c_fc"),
            ("mlp.linear_fc2", "mlp.c_proj"),
        ]:
            out[f"{theirs}{b}.weight"] = state[f"{ours}{a}.weight"].t()
            out[f"{theirs}{b}.bias"] = state[f"{ours}{a}.bias"]
    return out


def to_llama(model: GPTModel) -> dict[str, torch.Tensor]:
    """Grouped rows and [gate; up] to Llama's separate projections."""
    state, config = model.state_dict(), model.config
    out = {
        "model.embed_tokens.weight": state["embedding.word_embeddings.weight"],
        "model.norm.weight": state["decoder.final_layernorm.weight"],
        "lm_head.weight": state["output_layer.weight"],
    }
    per_group = config.num_attention_heads // config.query_groups
    for i in range(config.num_layers):
        ours, theirs = f"decoder.layers.{i}.", f"model.layers.{i}."
        out[f"{theirs}input_layernorm.weight"] = state[f"{ours}input_layernorm.weight"]
        out[f"{theirs}post_attention_layernorm.weight"] = state[f"{ours}pre_mlp_layernorm.weight"]
        qkv = state[f"{ours}self_attention.linear_qkv.weight"]
        grouped = qkv.view(config.query_groups, per_group + 2, config.head_dim, -1)
        for name, rows in zip("qkv", grouped.split((per_group, 1, 1), dim=1), strict=True):
            out[f"{theirs}self_attn.{name}_proj.weight"] = rows.reshape(-1, config.hidden_size)
        out[f"{theirs}self_attn.o_proj.weight"] = state[f"{ours}self_attention.linear_proj.weight"]
        gate, up = state[f"{ours}mlp.linear_fc1.weight"].chunk(2)
        out[f"{theirs}mlp.gate_proj.weight"], out[f"{theirs}mlp.up_proj.weight"] = gate, up
        out[f"{theirs}mlp.down_proj.weight"] = state[f"{ours}mlp.linear_fc2.weight"]
    return out


def check_logits(
    model: GPTModel, reference: torch.nn.Module, state: dict[str, torch.Tensor]
) -> None:
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert not unexpected
    assert all("attn.bias" in name or "rotary" in name for name in missing)
    tokens = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        expected, measured = reference.eval()(tokens).logits, model(tokens)
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(measured, expected, **SAME_LOGITS)


def test_gpt2_gives_the_same_logits() -> None:
    config = GPTConfig(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=32)
    model = perturbed(config)
    reference = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_positions=32,
            n_embd=64,
            n_layer=2,
            n_head=4,
            layer_norm_epsilon=1e-5,
        )
    )
    check_logits(model, reference, to_gpt2(model))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_llama_gives_the_same_logits(groups: int) -> None:
    config = GPTConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=160,
        seq_length=32,
        group_query_attention=True,
        num_query_groups=groups,
        position_embedding_type="rope",
        rotary_base=50000.0,
        normalization="RMSNorm",
        swiglu=True,
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
    )
    model = perturbed(config)
    reference = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=groups,
            max_position_embeddings=32,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        )
    )
    check_logits(model, reference, to_llama(model))
