"""Meta's own program, as far as logits go, over the files of all its ranks: written down from what
it does, and knowing nothing of ours.

b batch, s sequence, n heads, d head channels."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


def files_of(folder: Path) -> list[dict[str, Tensor]]:
    paths = sorted(folder.glob("consolidated.*.pth"))
    return [torch.load(path, weights_only=True) for path in paths]


def merged(folder: Path, dim: int) -> dict[str, Tensor]:
    """Parallel layers put together: columns of `RowParallelLinear` and, before Llama 3, of
    `ParallelEmbedding`; rows of the others."""
    ranks = files_of(folder)
    whole = {}
    for name, first in ranks[0].items():
        parts = [rank[name] for rank in ranks]
        if "norm" in name:
            assert all(torch.equal(part, first) for part in parts)
            whole[name] = first
            continue
        by_columns = name.endswith((".wo.weight", ".w2.weight")) or (
            name.startswith("tok_") and first.shape[-1] != dim
        )
        whole[name] = torch.cat(parts, dim=1 if by_columns else 0)
    return whole


def rotations(d: int, length: int, params: dict[str, Any]) -> Tensor:
    """`precompute_freqs_cis`, with `apply_scaling` of Llama 3.1: (s, d/2) complex."""
    freqs = 1.0 / params.get("rope_theta", 10000.0) ** (torch.arange(0, d, 2).float() / d)
    if params.get("use_scaled_rope"):
        factor, scaled = params.get("rope_scaling_factor", 32.0), []
        for freq in freqs.tolist():
            wavelength = 2 * math.pi / freq
            smooth = (8192 / wavelength - 1) / (4 - 1)
            if wavelength < 8192 / 4:
                scaled.append(freq)
            elif wavelength > 8192 / 1:
                scaled.append(freq / factor)
            else:
                scaled.append((1 - smooth) * freq / factor + smooth * freq)
        freqs = torch.tensor(scaled)
    angles = torch.outer(torch.arange(length).float(), freqs)
    return torch.polar(torch.ones_like(angles), angles)


def rotated(heads: Tensor, turns: Tensor) -> Tensor:
    """`apply_rotary_emb`: neighbouring channels as a complex number. heads: (b, s, n, d)."""
    numbers = torch.view_as_complex(heads.reshape(*heads.shape[:-1], -1, 2))
    return torch.view_as_real(numbers * turns[None, :, None]).flatten(3)


def meta_logits(folder: Path, tokens: Tensor) -> Tensor:
    """`Transformer.forward` of Meta's program, and of Mistral's. tokens: (b, s)."""
    params = json.loads((folder / "params.json").read_text())
    w, n, (b, s) = merged(folder, params["dim"]), params["n_heads"], tokens.shape
    d, groups = params.get("head_dim", params["dim"] // n), params.get("n_kv_heads", n)
    turns = rotations(d, s, params)
    hidden = w["tok_embeddings.weight"][tokens]
    distance = torch.arange(s)[:, None] - torch.arange(s)[None, :]
    hides = (distance < 0) | (distance >= params.get("sliding_window", s))

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + params["norm_eps"]) * w[name]

    for layer in range(params["n_layers"]):
        at = f"layers.{layer}."
        x = norm(hidden, f"{at}attention_norm.weight")
        q, k, v = ((x @ w[f"{at}attention.w{part}.weight"].t()).view(b, s, -1, d) for part in "qkv")
        q, k = rotated(q, turns), rotated(k, turns)
        k, v = (heads.repeat_interleave(n // groups, dim=2) for heads in (k, v))
        scores = torch.einsum("bqnd,bknd->bnqk", q, k) / math.sqrt(d)
        shares = scores.masked_fill(hides, -math.inf).softmax(-1)
        seen = torch.einsum("bnqk,bknd->bqnd", shares, v).reshape(b, s, n * d)
        hidden = hidden + seen @ w[f"{at}attention.wo.weight"].t()
        x = norm(hidden, f"{at}ffn_norm.weight")
        gate, up = (x @ w[f"{at}feed_forward.w{part}.weight"].t() for part in "13")
        hidden = hidden + (silu(gate) * up) @ w[f"{at}feed_forward.w2.weight"].t()
    return norm(hidden, "norm.weight") @ w["output.weight"].t()
