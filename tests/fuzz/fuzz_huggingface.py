"""Any Hugging Face folder or Meta params.json gives readable tensors or a named error."""

from __future__ import annotations

import json
import struct

import atheris
from common import fuzz, only, scratch

with atheris.instrument_imports(include=["trainyard.conversion"]):
    from trainyard.conversion.huggingface import read as hf_read
    from trainyard.conversion.meta import read as meta

import torch
from safetensors.torch import save

from trainyard.checkpoint.bounds import check_model
from trainyard.checkpoint.safetensors.file import spec_of
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.documents import read_document
from trainyard.conversion.meta.params import EMBEDDING, read_params
from trainyard.errors import ArtifactError, ConfigError

FOLDER = scratch()
H, F, ROWS = 4, 6, 5
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": H,
    "intermediate_size": F,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": ROWS,
    "tie_word_embeddings": True,
    "layer_types": ["full_attention"],
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
}
PARAMS = {"dim": H, "n_layers": 1, "n_heads": 2, "multiple_of": 2, "ffn_dim_multiplier": 1.5}
SPECS = {EMBEDDING: TensorSpec("F32", (ROWS, H))}

SHAPES = {
    **{"embed_tokens": (ROWS, H), "norm": (H,)},
    **{f"layers.0.{name}_layernorm": (H,) for name in ("input", "post_attention")},
    **{f"layers.0.mlp.{name}_proj": (F, H) for name in ("gate", "up")},
    **{"layers.0.mlp.down_proj": (H, F), "layers.0.self_attn.o_proj": (H, H)},
    **{f"layers.0.self_attn.{name}_proj": (n, H) for name, n in (("q", 4), ("k", 2), ("v", 2))},
}
WEIGHTS = {f"model.{name}.weight": torch.ones(shape) for name, shape in SHAPES.items()} | {
    f"model.layers.0.self_attn.{name}_proj.bias": torch.ones(n)
    for name, n in (("q", 4), ("k", 2), ("v", 2))
}
SHARD = "shard.safetensors"
INDEX = {"weight_map": dict.fromkeys(WEIGHTS, SHARD)}

SOUND = {
    "config.json": json.dumps(CONFIG).encode(),
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "generation_config.json": b'{"eos_token_id": 1, "temperature": 0.5}',
    SHARD: save(WEIGHTS),
}
NAMES = (*SOUND, "params.json")


def target(data: bytes) -> None:
    """The first byte says of which file the rest is."""
    if not data:
        return
    name = NAMES[data[0] % len(NAMES)]
    place = FOLDER / name
    place.write_bytes(data[1:])
    with only(ArtifactError, ConfigError):
        if name == "params.json":
            config, rows = read_params(read_document(str(place)), str(place), SPECS)
            check_model(config, rows, len(WEIGHTS), str(place))
            assert len(meta.wanted_shapes(config, rows)) < 12 * len(WEIGHTS)
            return
        with hf_read.open_huggingface(str(FOLDER)) as source:
            for tensor, spec in source.specs.items():
                assert spec_of(source.read(tensor)) == spec
    if name in SOUND:
        place.write_bytes(SOUND[name])


def seeds() -> list[bytes]:
    found = [bytes([k]) + data for k, data in enumerate(SOUND.values())]
    header = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    text = json.dumps(header).encode()
    found.append(bytes([NAMES.index(SHARD)]) + struct.pack("<Q", len(text)) + text + bytes(24))
    return [*found, bytes([len(SOUND)]) + json.dumps(PARAMS).encode()]


if __name__ == "__main__":
    for sound, contents in SOUND.items():
        (FOLDER / sound).write_bytes(contents)
    fuzz(target, seeds())
