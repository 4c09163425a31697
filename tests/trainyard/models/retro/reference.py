"""Retro for one text, in loops over tokens, neighbours and heads: no padding, no masks, no shifts.

Equations of arXiv:2112.04426, sections 2.3 and 2.4, with learned positions, and Megatron-LM's
residual stream in the encoder. Reads the weights of a model; shares no code with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainyard.models.retro.model import RetroModel

Text = list[int]
Visible = Callable[[int], int]


class Reference:
    """The logits of a model, slowly."""

    def __init__(self, model: RetroModel) -> None:
        self.weights = dict(model.named_parameters())
        self.config = model.config

    def logits(self, tokens: Text, neighbors: Sequence[Sequence[Text]]) -> Tensor:
        """(s, V). neighbors: of each of the first chunks, those that exist."""
        x, encoded = self.embedded(tokens), []
        for number in range(self.config.num_layers):
            name = f"decoder.layers.{number}"
            x = x + self.self_attention(name, self.norm(f"{name}.input_layernorm", x), causal=True)
            if f"{name}.cross_attention.attn.linear_q.weight" in self.weights:
                normalised = self.norm(f"{name}.pre_cross_attn_layernorm", x)
                if not encoded:
                    encoded = self.encode_all(name, neighbors, normalised)
                x = self.with_neighbors(f"{name}.cross_attention.attn", x, normalised, encoded)
            x = x + self.mlp(name, self.norm(f"{name}.pre_mlp_layernorm", x))
        return self.norm("decoder.final_layernorm", x) @ self.words.T

    # --- neighbours ---------------------------------------------------------------------------

    def encode_all(
        self, name: str, neighbors: Sequence[Sequence[Text]], x: Tensor
    ) -> list[list[Tensor]]:
        m = self.config.retro_chunk_length
        return [
            [self.encode(f"{name}.cross_attention.encoder", text, x[u * m : (u + 1) * m])
             for text in texts]
            for u, texts in enumerate(neighbors)
        ]  # fmt: skip

    def encode(self, name: str, text: Text, chunk: Tensor) -> Tensor:
        """(tokens, h) of one neighbour of a chunk."""
        x = self.embedded(text)
        for number in range(self.config.retro_encoder_layers):
            layer = f"{name}.layers.{number}"
            attended = self.norm(f"{layer}.input_layernorm", x)
            x = x + self.self_attention(layer, attended, causal=False)
            norm = "pre_mlp_layernorm"
            if number == 0:
                x = self.norm(f"{layer}.pre_cross_attn_layernorm", x)
                x = x + self.cross(f"{layer}.cross_attention.attn", x, chunk)
                norm = "pre_mlp_layernorm.norm"
            x = x + self.mlp(layer, self.norm(f"{layer}.{norm}", x))
        return x

    def with_neighbors(
        self, name: str, x: Tensor, normalised: Tensor, encoded: list[list[Tensor]]
    ) -> Tensor:
        m, rows = self.config.retro_chunk_length, list(x)
        for place in range(len(x)):
            chunk = (place - m + 1) // m  # the last token of a chunk sees its neighbours
            if 0 <= chunk < len(encoded) and encoded[chunk]:
                source = torch.cat(encoded[chunk])
                branch = self.cross(name, normalised[place : place + 1], source)[0]
                rows[place] = x[place] + self.config.retro_attention_gate * branch
        return torch.stack(rows)

    # --- layers -------------------------------------------------------------------------------

    @property
    def words(self) -> Tensor:
        return self.weights["embedding.word_embeddings.weight"]

    def embedded(self, tokens: Text) -> Tensor:
        places = self.weights["embedding.position_embeddings.weight"]
        return self.words[tokens] + places[: len(tokens)]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        scaled = centred / (centred.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def mlp(self, name: str, x: Tensor) -> Tensor:
        inner = self.linear(f"{name}.mlp.linear_fc1", x)
        root = math.sqrt(2 / math.pi)
        gelu = 0.5 * inner * (1 + torch.tanh(root * (inner + 0.044715 * inner**3)))
        return self.linear(f"{name}.mlp.linear_fc2", gelu)

    def self_attention(self, name: str, x: Tensor, *, causal: bool) -> Tensor:
        groups, d = self.config.query_groups, self.config.head_dim
        qkv = self.linear(f"{name}.self_attention.linear_qkv", x).unflatten(1, (groups, -1, d))
        q, k, v = qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2], qkv[:, :, -1]
        visible: Visible = (lambda place: place + 1) if causal else (lambda place: len(x))
        return self.linear(f"{name}.self_attention.linear_proj", attend(q, k, v, visible))

    def cross(self, name: str, x: Tensor, source: Tensor) -> Tensor:
        groups, d = self.config.query_groups, self.config.head_dim
        q = self.linear(f"{name}.linear_q", x).unflatten(1, (-1, d))
        kv = self.linear(f"{name}.linear_kv", source).unflatten(1, (groups, 2, d))
        context = attend(q, kv[:, :, 0], kv[:, :, 1], lambda place: len(source))
        return self.linear(f"{name}.linear_proj", context)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
    """q: (s, n, d), k, v: (t, g, d). visible: how many keys the token at a place sees."""
    n, g, rows = q.shape[1], k.shape[1], []
    for place in range(len(q)):
        heads: list[Any] = []
        for head in range(n):
            group, end = head * g // n, visible(place)
            scores = k[:end, group] @ q[place, head] / math.sqrt(q.shape[2])
            heads.append(scores.softmax(dim=0) @ v[:end, group])
        rows.append(torch.cat(heads))
    return torch.stack(rows)
