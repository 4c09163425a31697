"""Arguments of Megatron-LM that follow from the tensors of its files: those that files of 2019
lack, and those that only the tensors of a BERT or a T5 tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainyard.conversion.megatron.folder import RankFile
from trainyard.conversion.megatron.names import STACKS, layer_of
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.config import ModelType
from trainyard.models.gpt.checkpoint_names import EMBEDDING, FINAL_NORM

Ranks = Sequence[Sequence[RankFile]]
"""By pipeline rank, then by tensor rank."""

Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(ranks: Ranks, family: ModelType) -> Shapes:
    """Of the parameters of tensor rank 0; those of the first stage where layers are numbered
    alike."""
    chunks = [chunk for row in ranks for chunk in row[0].chunks(tied=True, family=family)]
    return {p.name: p.ref.shape for chunk in reversed(chunks) for p in chunk.parameters}


def _facts_of_bert(shapes: Shapes) -> dict[str, Any]:
    """What the tensors of a BERT say of its heads and token types."""
    types = shapes.get("embedding.tokentype_embeddings.weight", (0,))
    return {
        "model_type": "bert",
        "bert_binary_head": "binary_head.weight" in shapes,
        "num_tokentypes": types[0] if types else 0,
    }


def _facts_of_t5(shapes: Shapes) -> dict[str, Any]:
    """What the tensors of a T5 say of its depths: Megatron core ignores --decoder-num-layers."""
    layers: dict[str, set[int]] = {"encoder": set(), "decoder": set()}
    for name in shapes:
        if (layer := layer_of(name)) is not None:
            layers[name.partition(".")[0]].add(layer)
    return {
        "model_type": "t5",
        "num_layers": 1 + max(layers["encoder"], default=-1),
        "decoder_num_layers": 1 + max(layers["decoder"], default=-1),
    }


def _facts_of_retro(shapes: Shapes) -> dict[str, Any]:
    """Whether it has a norm after the last layer."""
    has_norm = any(name.startswith(FINAL_NORM) for name in shapes)
    return {"model_type": "retro", "retro_no_final_layernorm": not has_norm}


FACTS: dict[ModelType, Callable[[Shapes], dict[str, Any]]] = {
    "gpt": lambda shapes: {},
    "bert": _facts_of_bert,
    "t5": _facts_of_t5,
    "mamba": lambda shapes: {"model_type": "mamba"},
    "retro": _facts_of_retro,
}
"""Arguments that follow from the tensors of a family."""


WITH_ARGS = {"t5": "T5", "mamba": "hybrid", "retro": "Retro"}
"""Families that are younger than arguments in files."""

# --- files without arguments ------------------------------------------------------------------


POSITIONS = "embedding.position_embeddings.weight"
FC1 = "layers.0.mlp.linear_fc1.weight"

OF_2019 = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "norm_epsilon": 1e-5,
    "bias_gelu_fusion": True,
}
"""Arguments of GPT-2 and BERT: learned positions, LayerNorm, tanh GELU, tied embeddings."""


def args_of_bare_file(ranks: Ranks, given: Mapping[str, Any], family: ModelType) -> dict[str, Any]:
    """The arguments that follow from the tensors, and those given.

    For files of 2019, such as NVIDIA's GPT-345M and BERT-345M. Raises ConfigError if the number of
    heads is not given, since the tensors do not determine it."""
    options = {name: value for name, value in given.items() if value is not None}
    first = ranks[0][0]
    if family in WITH_ARGS:
        raise ArtifactError(
            f"{first.url}: has no args, which every {WITH_ARGS[family]} of Megatron-LM has"
        )
    if "num_attention_heads" not in options:
        raise ConfigError(
            f"{first.url}: has no args, like files of 2019, so its number of heads is not known; "
            "give --num-attention-heads (16 for NVIDIA's GPT-345M and BERT-345M)"
        )
    chunks = [chunk for row in ranks for chunk in row[0].chunks(tied=True, family=family)]
    shapes = shapes_of(ranks, family)
    found: dict[str, Any] = {"num_layers": sum(chunk.num_layers for chunk in chunks)}
    if len(shapes.get(EMBEDDING, ())) == 2:
        found["hidden_size"] = shapes[EMBEDDING][1]
    if POSITIONS in shapes:
        found["seq_length"] = found["max_position_embeddings"] = shapes[POSITIONS][0]
    fc1 = f"{STACKS[family][0]}{FC1}"
    if fc1 in shapes:
        found["ffn_hidden_size"] = shapes[fc1][0] * len(ranks[0])
    return {**OF_2019, **found, **options}
