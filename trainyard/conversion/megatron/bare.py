"""Arguments of a file that holds none: those of 2019, as NVIDIA's published GPT-345M.

Sizes follow from the tensors, and the rest is what that release computed. The number of heads does
not follow from anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainyard.conversion.megatron.rank import RankFile
from trainyard.errors import ConfigError
from trainyard.models.gpt.checkpoint_names import EMBEDDING

POSITIONS = "embedding.position_embeddings.weight"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"

OF_2019 = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "norm_epsilon": 1e-5,
    "bias_gelu_fusion": True,
}
"""GPT-2: learned positions, LayerNorm, GELU in its tanh form, tied embeddings."""


def args_of_bare_file(ranks: list[list[RankFile]], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that the tensors tell, and those that were given.

    Raises ConfigError where the number of heads was not given."""
    told = {name: value for name, value in given.items() if value is not None}
    first = ranks[0][0]
    if "num_attention_heads" not in told:
        raise ConfigError(
            f"{first.url}: holds no args, as files of 2019 do not, so the number of its heads is "
            "not known; give --num-attention-heads (16 for NVIDIA's GPT-345M)"
        )
    chunks = [chunk for row in ranks for chunk in row[0].chunks(tied=True)]
    shapes = {p.name: p.ref.shape for chunk in reversed(chunks) for p in chunk.parameters}
    found: dict[str, Any] = {"num_layers": sum(chunk.num_layers for chunk in chunks)}
    if len(shapes.get(EMBEDDING, ())) == 2:
        found["hidden_size"] = shapes[EMBEDDING][1]
    if POSITIONS in shapes:
        found["seq_length"] = found["max_position_embeddings"] = shapes[POSITIONS][0]
    if FC1 in shapes:
        found["ffn_hidden_size"] = shapes[FC1][0] * len(ranks[0])
    return {**OF_2019, **found, **told}
