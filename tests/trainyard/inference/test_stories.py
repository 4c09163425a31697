"""A trained model from elsewhere: stories260K tells its known story, token by token."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from trainyard.inference.static import generate
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel

BOS = 1
STEPS = 200


def read_model(path: Path) -> GPTModel:
    """The llama2.c file: seven int32, then fp32 blocks, each over all layers."""
    data = path.read_bytes()
    h, ffn, layers, heads, groups, vocab, length = struct.unpack("<7i", data[:28])
    config = GPTConfig(
        num_layers=layers,
        hidden_size=h,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        group_query_attention=True,
        num_query_groups=groups,
        seq_length=length,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        disable_bias_linear=True,
    )
    values, at = torch.from_numpy(np.frombuffer(data[28:], dtype="<f4").copy()), 0

    def block(*shape: int) -> torch.Tensor:
        nonlocal at
        at += int(np.prod(shape))
        return values[at - int(np.prod(shape)) : at].view(shape)

    d = config.head_dim
    state = {"embedding.word_embeddings.weight": block(vocab, h)}
    norm1, q = block(layers, h), block(layers, groups, heads // groups * d, h)
    k, v = block(layers, groups, d, h), block(layers, groups, d, h)
    proj, norm2 = block(layers, h, heads * d), block(layers, h)
    gate, down, up = block(layers, ffn, h), block(layers, h, ffn), block(layers, ffn, h)
    state["decoder.final_layernorm.weight"] = block(h)
    qkv = torch.cat((halves(q, d), halves(k, d), v), dim=2).flatten(1, 2)
    for i in range(layers):
        state |= {
            f"decoder.layers.{i}.input_layernorm.weight": norm1[i],
            f"decoder.layers.{i}.self_attention.linear_qkv.weight": qkv[i],
            f"decoder.layers.{i}.self_attention.linear_proj.weight": proj[i],
            f"decoder.layers.{i}.pre_mlp_layernorm.weight": norm2[i],
            f"decoder.layers.{i}.mlp.linear_fc1.weight": torch.cat((gate[i], up[i])),
            f"decoder.layers.{i}.mlp.linear_fc2.weight": down[i],
        }
    model = GPTModel(config, vocab)
    model.load_state_dict(state)
    return model.eval()


def halves(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of rotating neighbours (0 1)(2 3).. to rotating halves, in every head."""
    layers, groups, _, h = rows.shape
    pairs = rows.view(layers, groups, -1, head_dim // 2, 2, h)
    return pairs.transpose(3, 4).reshape(rows.shape)


def read_pieces(path: Path) -> list[bytes]:
    """The llama2.c tokenizer: an int32, then for each token score, length, text."""
    data, at, pieces = path.read_bytes(), 4, []
    while at < len(data):
        (length,) = struct.unpack_from("<i", data, at + 4)
        piece = data[at + 8 : at + 8 + length]
        byte = re.fullmatch(rb"<0x([0-9A-F]{2})>", piece)
        pieces.append(bytes([int(byte[1], 16)]) if byte else piece)
        at += 8 + length
    return pieces


@pytest.mark.slow
def test_a_published_model_generates_its_known_story(shared: Path) -> None:
    folder = shared / "data" / "checkpoints" / "stories260K"
    model, pieces = read_model(folder / "stories260K.bin"), read_pieces(folder / "tok512.bin")
    expected = (folder / "expected_greedy_200.txt").read_text().rstrip("\n")
    tokens = generate(model, [[BOS]], STEPS).outputs[0]
    story = b"".join(pieces[token] for token in tokens).decode().strip()
    assert story[: len(expected)] == expected
    assert len(story) <= len(expected) + 8
