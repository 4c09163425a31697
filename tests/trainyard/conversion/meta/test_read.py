"""Reading Llama checkpoints in Meta's layout."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.trainyard.checkpoint.samples import model_of_source
from tests.trainyard.conversion.huggingface.hf_models import LLAMA, VOCAB, make, some_tokens
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.meta.params import read_params
from trainyard.conversion.meta.read import CUT_ALONG, halves_of_pairs, open_meta
from trainyard.conversion.tokenizer_files import tokenizer_of
from trainyard.errors import ArtifactError, ConfigError
from trainyard.inference.static import generate
from trainyard.models.gpt.model import GPTModel

SAME_LOGITS = {"rtol": 1e-5, "atol": 1e-5}

PARAMS: dict[str, Any] = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "norm_eps": 1e-6,
    "multiple_of": 48,
    "ffn_dim_multiplier": 0.5,
    "vocab_size": VOCAB,
}
NAMES = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
"""Hugging Face's and Meta's, of a layer."""


def pairs_of_halves(rows: Tensor, d: int) -> Tensor:
    """What transformers' converter undoes."""
    return rows.view(-1, 2, d // 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def as_meta(state: dict[str, Tensor], num_layers: int, d: int) -> dict[str, Tensor]:
    """A Llama of transformers under Meta's names, with rotary rows in pairs."""
    found = {
        "tok_embeddings.weight": state["model.embed_tokens.weight"],
        "norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for layer in range(num_layers):
        for theirs, name in NAMES.items():
            tensor = state[f"model.layers.{layer}.{theirs}.weight"]
            if name.endswith(("wq", "wk")):
                tensor = pairs_of_halves(tensor, d)
            found[f"layers.{layer}.{name}.weight"] = tensor
    return found


def write_meta(
    folder: Path, tensors: dict[str, Tensor], tp: int, params: dict[str, Any], rows_cut: bool
) -> None:
    """The files of `tp` ranks. rows_cut: they share out rows of the embedding, as of Llama 3."""
    folder.mkdir(exist_ok=True)
    (folder / "params.json").write_text(json.dumps(params))
    for rank in range(tp):
        slices = {"rope.freqs": torch.ones(4)}
        for name, tensor in tensors.items():
            dim = CUT_ALONG[name.removesuffix(".weight").rpartition(".")[2]]
            dim = 0 if rows_cut and name.startswith("tok_") else dim
            part = tensor if dim is None else tensor.chunk(tp, dim)[rank]
            slices[name] = part.clone()
        torch.save(slices, folder / f"consolidated.{rank:02d}.pth")


def filled(url: Path) -> GPTModel:
    with open_meta(str(url)) as source:
        return model_of_source(source)


@pytest.mark.parametrize(("tp", "rows_cut"), [(1, False), (2, False), (2, True)])
def test_the_logits_are_those_of_transformers(tp: int, rows_cut: bool, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    theirs = make("llama", tmp_path / "hf")
    tensors = as_meta(theirs.state_dict(), LLAMA["num_hidden_layers"], 8)
    write_meta(tmp_path / "meta", tensors, tp, PARAMS, rows_cut)
    ours, tokens = filled(tmp_path / "meta"), some_tokens()
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, **SAME_LOGITS)


def test_pairs_become_halves_and_back() -> None:
    rows = torch.arange(16).view(16, 1)  # two heads of eight channels
    turned = halves_of_pairs(rows, 8).flatten().tolist()
    assert turned == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    assert torch.equal(pairs_of_halves(halves_of_pairs(rows, 8), 8), rows)


@pytest.mark.slow
def test_the_known_story_is_generated(shared: Path, tmp_path: Path) -> None:
    folder = shared / "data" / "checkpoints" / "stories260K"
    tensors, params = read_llama2c(folder / "stories260K.bin")
    write_meta(tmp_path, tensors, 2, params, rows_cut=False)
    (tmp_path / "tokenizer.model").write_bytes((folder / "tok512.model").read_bytes())
    with open_meta(str(tmp_path)) as source:
        assert source.vocab_size == source.padded_vocab_size == 512
        files = source.tokenizer_files()
    tokenizer = tokenizer_of(files)
    expected = (folder / "expected_greedy_200.txt").read_text().rstrip("\n")
    tokens = generate(filled(tmp_path), [[1]], 200).outputs[0]
    story = tokenizer.decode([token for token in tokens if token != 1]).strip()
    assert story[: len(expected)] == expected


def read_llama2c(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The llama2.c file, seven int32 and then fp32 blocks over all layers, under Meta's names; its
    rotary rows are pairs as there."""
    data = path.read_bytes()
    h, ffn, layers, heads, groups, vocab, length = struct.unpack("<7i", data[:28])
    values, at = torch.from_numpy(np.frombuffer(data[28:], dtype="<f4").copy()), 0
    kv = h // heads * groups
    shapes = {
        "attention_norm": (h,),
        "attention.wq": (h, h),
        "attention.wk": (kv, h),
        "attention.wv": (kv, h),
        "attention.wo": (h, h),
        "ffn_norm": (h,),
        "feed_forward.w1": (ffn, h),
        "feed_forward.w2": (h, ffn),
        "feed_forward.w3": (ffn, h),
    }
    found = {"tok_embeddings.weight": values[: vocab * h].view(vocab, h)}
    at = vocab * h
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        for layer in range(layers):
            found[f"layers.{layer}.{name}.weight"] = values[at : at + size].view(shape)
            at += size
    found["norm.weight"] = values[at : at + h]
    params = {
        **{"dim": h, "n_layers": layers, "n_heads": heads, "n_kv_heads": groups},
        **{"hidden_dim": ffn, "max_seq_len": length, "vocab_size": -1, "norm_eps": 1e-5},
    }
    return found, params


# --- params.json ----------------------------------------------------------------------------------

EMBEDDING = {"tok_embeddings.weight": TensorSpec("F32", (VOCAB, 32))}

PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "7B": (
        {"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-05},
        {"ffn_size": 11008, "query_groups": 32, "positions": 4096, "rotary_base": 10000.0},
    ),
    "2 70B": (
        {
            **{"dim": 8192, "multiple_of": 4096, "ffn_dim_multiplier": 1.3, "n_heads": 64},
            **{"n_kv_heads": 8, "n_layers": 80, "norm_eps": 1e-05, "vocab_size": -1},
        },
        {"ffn_size": 28672, "query_groups": 8, "positions": 4096},
    ),
    "3 8B": (
        {
            **{"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256},
            **{"multiple_of": 1024, "ffn_dim_multiplier": 1.3, "norm_eps": 1e-05},
            "rope_theta": 500000.0,
        },
        {"ffn_size": 14336, "positions": 8192, "rotary_base": 5e5, "use_rope_scaling": False},
    ),
    "3.1 8B": (
        {
            **{"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256},
            **{"multiple_of": 1024, "ffn_dim_multiplier": 1.3, "norm_eps": 1e-05},
            **{"rope_theta": 500000.0, "use_scaled_rope": True},
        },
        {"positions": 131072, "use_rope_scaling": True, "rope_scaling_factor": 8.0},
    ),
    "3.2 1B": (
        {
            **{"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256},
            **{"multiple_of": 256, "ffn_dim_multiplier": 1.5, "norm_eps": 1e-05},
            **{"rope_theta": 500000.0, "use_scaled_rope": True},
        },
        {
            "ffn_size": 8192,
            "rope_scaling_factor": 32.0,
            "untie_embeddings_and_output_weights": False,
        },
    ),
    "Mistral 7B 0.1": (
        {
            **{"dim": 4096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32},
            **{"n_kv_heads": 8, "norm_eps": 1e-05, "sliding_window": 4096, "vocab_size": 32000},
        },
        {"ffn_size": 14336, "window_size": "4095,0", "positions": 32768, "rotary_base": 10000.0},
    ),
    "Mistral Nemo": (
        {
            **{"dim": 5120, "n_layers": 40, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32},
            **{"n_kv_heads": 8, "norm_eps": 1e-05, "vocab_size": 131072},
        },
        {"ffn_size": 14336, "window_size": None, "query_size": 4096, "rotary_base": 1e6},
    ),
}
"""Of Llama's and Mistral's folders, and what they say."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    params, expected = PUBLISHED[name]
    config, rows = read_params(params, "there", EMBEDDING)
    assert {key: getattr(config, key) for key in expected} == expected
    assert rows == (params.get("vocab_size", -1) if params.get("vocab_size", -1) > 0 else VOCAB)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe": {"num_experts": 8}}, r"does not know moe"),
        ({"quantization_args": {"scheme": "int4"}}, "does not know quantization_args"),
        ({"norm_type": "layer"}, "does not know norm_type"),
        ({"rope_high_freq_factor": 2.0}, "rope_high_freq_factor is 2.0"),
    ],
)
def test_unknown_fields_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_params({**PARAMS, **changes}, "there", EMBEDDING)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    tensors = {"tok_embeddings.weight": torch.ones(VOCAB, 32), "norm.weight": torch.ones(32)}
    write_meta(tmp_path, tensors, 2, PARAMS, rows_cut=True)
    with pytest.raises(ArtifactError, match=r"18 missing:\s+layers\.0\.attention\.wk"):
        open_meta(str(tmp_path))
    torch.save({"norm.weight": torch.ones(32)}, tmp_path / "consolidated.01.pth")
    with pytest.raises(
        ArtifactError, match=r"differs in type or shape between consolidated\.00\.pth and"
    ):
        open_meta(str(tmp_path))
    (tmp_path / "consolidated.00.pth").unlink()
    with pytest.raises(ConfigError, match=r"consolidated\.00\.pth is missing"):
        open_meta(str(tmp_path))
    (tmp_path / "consolidated.01.pth").unlink()
    with pytest.raises(ConfigError, match=r"has no consolidated\.00\.pth"):
        open_meta(str(tmp_path))
