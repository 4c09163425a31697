"""Rows that pad the vocabulary of a run of ours, as other programs get them: these score them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.trainyard.checkpoint.samples import PADDED_VOCAB, random_gpt, save
from trainyard.checkpoint.load import open_checkpoint
from trainyard.config import to_dict
from trainyard.conversion.native import CheckpointSource
from trainyard.models.gpt.config import GPTConfig

TOKENS = 257
TABLE = "embedding.word_embeddings.weight"
CONFIG = GPTConfig(num_layers=1, hidden_size=64, num_attention_heads=4, seq_length=16)


def source(folder: Path, **document: Any) -> CheckpointSource:
    """A model whose padding would be likelier than any token."""
    model = random_gpt(CONFIG)
    with torch.no_grad():
        model.embedding.word_embeddings.weight[TOKENS:] += 3.0  # type: ignore[union-attr]
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {
        f"optimizer.{kind}.{TABLE}": tensors[f"model.{TABLE}"].clone()
        for kind in ("param", "exp_avg")
    }
    sizes = {"vocab_size": TOKENS, "padded_vocab_size": PADDED_VOCAB}
    save(
        str(folder),
        tensors,
        1,
        documents={"config.json": {"model": to_dict(CONFIG), **sizes, **document}},
    )
    return CheckpointSource(open_checkpoint(str(folder)))


def test_padding_of_a_run_never_outweighs_its_share(tmp_path: Path) -> None:
    with source(tmp_path, run={"lr": 0.1}) as found:
        for name in (f"model.{TABLE}", f"optimizer.param.{TABLE}"):
            rows, kept = found.read(name), found.checkpoint.read(name)
            assert torch.equal(rows[:TOKENS], kept[:TOKENS]), "tokens are handed on as they are"
            for scale in (1.0, 30.0):
                generator = torch.Generator().manual_seed(0)
                hidden = torch.randn(100, 64, generator=generator) * scale
                shares = (hidden @ rows.T).softmax(dim=-1)[:, TOKENS:].sum(dim=-1)
                assert (shares <= 1.0001 * (PADDED_VOCAB - TOKENS) / PADDED_VOCAB).all()
        moments = f"optimizer.exp_avg.{TABLE}"
        assert torch.equal(found.read(moments), found.checkpoint.read(moments))
        bias = "model.decoder.final_layernorm.bias"
        assert torch.equal(found.read(bias), found.checkpoint.read(bias))


def test_padding_trained_by_others_is_kept(tmp_path: Path) -> None:
    with source(tmp_path, run={}, converted={"loader": "hf"}) as found:
        name = f"model.{TABLE}"
        assert torch.equal(found.read(name), found.checkpoint.read(name))
