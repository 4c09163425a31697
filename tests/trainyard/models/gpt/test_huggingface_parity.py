"""Logits and gradients against transformers' GPT-2, Llama, Mistral and Qwen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.trainyard.models.perturbed import perturb
from trainyard.conversion.huggingface.architecture import architecture
from trainyard.conversion.huggingface.config import model_document
from trainyard.conversion.huggingface.to_hf import targets
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import init_parameters
from trainyard.models.mlp import ACTIVATIONS
from trainyard.models.rope import rotary_frequencies
from trainyard.models.rope_factors import yarn_gain

transformers = pytest.importorskip("transformers")

SAME_LOGITS = {"rtol": 1e-4, "atol": 2e-5}
SAME_GRADIENTS = {"rtol": 1e-4, "atol": 1e-5}
VOCAB = 96

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 256,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
LLAMA: dict[str, Any] = {
    "ffn_hidden_size": 160,
    "position_embedding_type": "rope",
    "rotary_base": 10000.0,
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
GROUPED = {"group_query_attention": True, "num_query_groups": 2}
YARN = {
    "position_embedding_type": "yarn",
    "yarn_rotary_scaling_factor": 8.0,
    "yarn_original_max_position_embeddings": 32,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {}),
    "gpt2 exact gelu": ("GPT2LMHeadModel", {"bias_gelu_fusion": False}),
    "gpt2 quick gelu": ("GPT2LMHeadModel", {"quick_gelu": True}),
    "gpt2 squared relu": ("GPT2LMHeadModel", {"squared_relu": True}),
    "llama": ("LlamaForCausalLM", LLAMA),
    "llama one key head": ("LlamaForCausalLM", LLAMA | GROUPED | {"num_query_groups": 1}),
    "llama tied": (
        "LlamaForCausalLM",
        LLAMA | GROUPED | {"untie_embeddings_and_output_weights": False},
    ),
    "llama 3.1": ("LlamaForCausalLM", LLAMA | GROUPED | {"use_rope_scaling": True}),
    "llama linear": (
        "LlamaForCausalLM",
        LLAMA | {"rotary_seq_len_interpolation_factor": 4.0},
    ),
    "llama yarn": ("LlamaForCausalLM", LLAMA | YARN),
    "mistral": ("MistralForCausalLM", LLAMA | GROUPED | {"window_size": "15,0"}),
    "qwen2": ("Qwen2ForCausalLM", LLAMA | GROUPED | {"add_qkv_bias": True}),
    "qwen3": ("Qwen3ForCausalLM", LLAMA | GROUPED | {"qk_layernorm": True, "kv_channels": 24}),
}


def perturbed(config: GPTConfig) -> GPTModel:
    """A model whose biases and norms differ from their first values, so that each is seen to
    count."""
    model = GPTModel(config, VOCAB)
    init_parameters(model, 5)
    return perturb(model, seed=6, scale=0.05).eval()


def theirs(model: GPTModel) -> torch.nn.Module:
    """The model of transformers with the same weights."""
    document = model_document(model.config, VOCAB, "float32")
    config = transformers.AutoConfig.for_model(**document)
    reference = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    state = model.state_dict()
    converted = {
        target.name: target.convert(state[target.source]) for target in targets(model.config)
    }
    missing, unexpected = reference.load_state_dict(converted, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    reference.tie_weights()
    return reference


@pytest.mark.few_cases(4)
@pytest.mark.parametrize(("name", "changes"), KINDS.values(), ids=KINDS.keys())
def test_the_same_logits_and_gradients(name: str, changes: dict[str, Any]) -> None:
    config = GPTConfig(**(SMALL | changes))
    assert architecture(config) == name
    model = perturbed(config)
    reference = theirs(model)
    tokens = torch.randint(0, VOCAB, (2, 192), generator=torch.Generator().manual_seed(8))
    labels = tokens.roll(-1, dims=1)
    expected = reference(tokens).logits
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(model(tokens), expected, **SAME_LOGITS)
    model.loss(tokens, labels).mean().backward()
    functional.cross_entropy(expected.transpose(1, 2), labels).backward()
    gradients = {n: p.grad for n, p in reference.named_parameters()}
    for target in targets(config):
        ours = model.get_parameter(target.source).grad
        assert ours is not None
        torch.testing.assert_close(
            target.convert(ours), gradients[target.name], **SAME_GRADIENTS, msg=target.name
        )


@pytest.mark.parametrize(
    ("name", "theirs_is"), [("quick_gelu", "quick_gelu"), ("gelu_tanh", "gelu_new")]
)
def test_activations_are_those_of_transformers(name: str, theirs_is: str) -> None:
    from transformers.activations import ACT2FN

    x = torch.linspace(-12, 12, 4001, dtype=torch.float64, requires_grad=True)
    ours, right = ACTIVATIONS[name](x), ACT2FN[theirs_is](x)
    torch.testing.assert_close(ours, right)
    (got,), (wanted,) = (torch.autograd.grad(y.sum(), x) for y in (ours, right))
    torch.testing.assert_close(got, wanted)


def test_quick_geglu_is_the_gated_quick_gelu() -> None:
    gate, up = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(
        ACTIVATIONS["quick_geglu"](torch.cat((gate, up), -1)), ACTIVATIONS["quick_gelu"](gate) * up
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"rotary_base": 500000.0, "use_rope_scaling": True},
        {"rotary_base": 500000.0, "use_rope_scaling": True, "rope_scaling_factor": 32.0},
        *(
            {
                "rotary_base": 500000.0,
                "use_rope_scaling": True,
                "rope_scaling_original_max_position_embeddings": length,
            }
            for length in (4096, 16384)
        ),
        {"position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 4.0},
        {
            "position_embedding_type": "yarn",
            "yarn_rotary_scaling_factor": 32.0,
            "rotary_base": 150000.0,
            "yarn_correction_range_round_to_int": False,
        },
    ],
)
def test_scaled_frequencies_of_a_full_size_head(changes: dict[str, Any]) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = GPTConfig(**(SMALL | LLAMA | {"kv_channels": 128} | changes))
    document = model_document(config, VOCAB, "float32")
    kind = document["rope_parameters"]["rope_type"]
    their_config = transformers.AutoConfig.for_model(**document)
    frequencies, gain = ROPE_INIT_FUNCTIONS[kind](their_config, torch.device("cpu"))
    ours = rotary_frequencies(config, torch.device("cpu"))
    torch.testing.assert_close(ours, frequencies, rtol=1e-6, atol=0.0)
    assert gain == pytest.approx(yarn_gain(config) if kind == "yarn" else 1.0)
