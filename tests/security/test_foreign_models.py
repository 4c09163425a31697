"""Descriptions of models that others wrote are read or refused in a sentence, soon, whatever one of
their values is."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from trainyard.conversion.huggingface.compressed import Method, Quantization, read_quantization
from trainyard.conversion.huggingface.config_read import read_config
from trainyard.conversion.megatron.args import (
    FLOATS,
    OF_BERT,
    OF_T5,
    REFUSED,
    SAME_NAME,
    config_of,
)
from trainyard.conversion.megatron.expert_args import OF_EXPERTS
from trainyard.conversion.megatron.latent_args import OF_ACTIVATION, OF_LATENTS, OF_PREDICTION, YARN
from trainyard.conversion.megatron.mamba_args import OF_HYBRIDS
from trainyard.conversion.megatron.mamba_args import SAME_NAME as OF_MAMBA
from trainyard.conversion.megatron.written_args import KEPT_ARGS
from trainyard.errors import TrainyardError

WHERE = "model/config.json"
SOON_SECONDS = 5
"""On a busy machine; what allocates or loops by a number of the file takes minutes."""

VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    3,
    10**9,
    2**63 - 1,  # read_document refuses larger ones
    -0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../../etc/passwd",
    "\x1b]0;owned\x07",
    "M" * 10**5,
    "[" * 1000,
    "0" * 5000,
    "__import__('os')",
    [],
    [[]],
    [1, None],
    ["full_attention"] * 100_000,
    {},
    {"rope_type": {}, "type": []},
    {"rope_type": "yarn", "factor": 0},
    {"rope_type": "llama3", "factor": 1e308, "original_max_position_embeddings": -1},
]
HUGGING_FACE = {
    "LlamaForCausalLM": "LlamaConfig",
    "MixtralForCausalLM": "MixtralConfig",
    "Qwen3MoeForCausalLM": "Qwen3MoeConfig",
    "DeepseekV2ForCausalLM": "DeepseekV2Config",
    "DeepseekV3ForCausalLM": "DeepseekV3Config",
    "GptOssForCausalLM": "GptOssConfig",
    "Mamba2ForCausalLM": "Mamba2Config",
    "NemotronHForCausalLM": "NemotronHConfig",
    "T5ForConditionalGeneration": "T5Config",
    "BertForPreTraining": "BertConfig",
}


def check(read: Callable[..., Any], document: dict[str, Any], what: object) -> None:
    """Read a description; anything but a model or a sentence fails."""
    began = time.thread_time()
    try:
        read(document, WHERE)
    except TrainyardError as error:
        words = str(error)
        assert WHERE in words, what
        assert len(words) < 3000, what
        assert "\n" not in words, what
    assert time.thread_time() - began < SOON_SECONDS, what


@pytest.mark.slow
@pytest.mark.parametrize("architecture", HUGGING_FACE)
def test_a_config_of_hugging_face_with_any_value_is_read_or_refused(architecture: str) -> None:
    transformers = pytest.importorskip("transformers")
    made = getattr(transformers, HUGGING_FACE[architecture])()
    document = {**made.to_dict(), "architectures": [architecture]}
    if architecture == "NemotronHForCausalLM":  # by default with experts, which ours does not read
        layers = ["mamba", "attention", "mlp"]
        document |= {"layers_block_type": layers, "num_hidden_layers": len(layers)}
    read_config(document, WHERE)
    for key, value in itertools.product(document, VALUES):
        check(read_config, {**document, key: value}, (key, str(value)[:40]))


@pytest.mark.parametrize("method", ["fp8", "int8"])
def test_a_quantization_with_any_value_is_read_or_refused(method: Method) -> None:
    made = Quantization(method).document()
    group = made["config_groups"]["group_0"]
    for value in VALUES:
        what = str(value)[:40]
        check(read_quantization, {"quantization_config": value}, what)
        for key in made:
            check(read_quantization, {"quantization_config": {**made, key: value}}, (key, what))
        groups = [value, *({**group, key: value} for key in group)]
        weights = [
            {**group, "weights": {**group["weights"], key: value}} for key in group["weights"]
        ]
        for one in groups + weights:
            changed = {**made, "config_groups": {"group_0": one}}
            check(read_quantization, {"quantization_config": changed}, what)


GPT = {
    **{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32},
    **{"max_position_embeddings": 32, "position_embedding_type": "rope"},
    **{"window_size": (4, 0), "window_attn_skip_freq": 2},
}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_layer_freq": "[0,1]"}
LATENTS = {"multi_latent_attention": True, "q_lora_rank": 8, "mtp_num_layers": 1}
MEGATRON: dict[str, dict[str, Any]] = {
    "gpt": GPT,
    "experts": {**GPT, **EXPERTS},
    "latents": {**GPT, **LATENTS},
    "bert": {**GPT, "model_type": "bert", "bert_binary_head": True, "num_tokentypes": 2},
    "t5": {**GPT, "model_type": "t5", "decoder_num_layers": 2, "decoder_seq_length": 8},
    "mamba": {**GPT, "model_type": "mamba", "hybrid_layer_pattern": "M*-M", "num_layers": 4},
}
ARGUMENTS = sorted(
    {*SAME_NAME, *FLOATS, *KEPT_ARGS, *REFUSED, *OF_T5, *OF_BERT, *OF_HYBRIDS, *OF_EXPERTS}
    | {*OF_MAMBA, *OF_LATENTS, *OF_PREDICTION, *OF_ACTIVATION, *YARN}
    | {"add_bias_linear", "window_size", "window_attn_skip_freq", "rope_type"}
)


@pytest.mark.slow
@pytest.mark.parametrize("family", MEGATRON)
def test_arguments_of_megatron_with_any_value_are_read_or_refused(family: str) -> None:
    """They come from a pickle, whose integers have no bound."""
    for key, value in itertools.product(ARGUMENTS, [*VALUES, 10**400, (10**400, -1)]):
        check(config_of, {**MEGATRON[family], key: value}, (key, str(value)[:40]))
