"""What is told of a checkpoint is what its files hold, in any layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.trainyard.checkpoint.hostile import edited
from tests.trainyard.checkpoint.samples import (
    PADDED_VOCAB,
    random_gpt,
    save,
    save_gpt,
    some_tensors,
)
from trainyard.checkpoint.describe import Description, describe, kind_of
from trainyard.checkpoint.load import open_checkpoint
from trainyard.models.gpt.config import GPTConfig


def described(root: Path) -> Description:
    with open_checkpoint(str(root)) as checkpoint:
        return describe(checkpoint)


@pytest.mark.parametrize("shard_size_bytes", [2**32, 300])
def test_tensors_files_and_totals_are_those_at_rest(tmp_path: Path, shard_size_bytes: int) -> None:
    held = some_tensors()
    save(str(tmp_path), held, shard_size_bytes=shard_size_bytes)
    found = described(tmp_path)
    assert {row.name: row.shape for row in found.tensors} == {n: t.shape for n, t in held.items()}
    assert all(row.size_bytes == held[row.name].nbytes for row in found.tensors)
    folder = tmp_path / "iter_0000050"
    assert {row.name: row.size_bytes for row in found.files} == {
        path.name: path.stat().st_size for path in folder.iterdir() if path.name != "manifest.json"
    }
    assert sum(row.pieces for row in found.files) == sum(row.pieces for row in found.tensors)
    assert sum(total.size_bytes for total in found.totals) == sum(t.nbytes for t in held.values())
    assert sum(total.tensors for total in found.totals) == len(held)
    assert found.parameters == sum(t.numel() for n, t in held.items() if n.startswith("model."))
    kinds = {(total.kind, total.dtype) for total in found.totals}
    assert kinds == {
        ("model", "F32"),
        ("model", "BF16"),
        ("optimizer.exp_avg", "F32"),
        ("optimizer.exp_avg_sq", "F32"),
        ("rng", "U8"),
    }
    assert [row.ranks for row in found.files if row.name.startswith("rng")] == [(0,)]


def test_what_is_filtered_is_left_out_of_tensors_and_totals_only(tmp_path: Path) -> None:
    save(str(tmp_path), some_tensors())
    with open_checkpoint(str(tmp_path)) as checkpoint:
        found = describe(checkpoint, lambda name: name.endswith(".bias"))
        whole = describe(checkpoint)
    assert [row.name for row in found.tensors] == [
        "model.layers.0.bias",
        "optimizer.exp_avg.layers.0.bias",
        "optimizer.exp_avg_sq.layers.0.bias",
    ]
    assert [total.elements for total in found.totals] == [8, 8, 8]
    assert (found.files, found.parameters) == (whole.files, whole.parameters)


def test_a_model_and_its_training_are_described(tmp_path: Path) -> None:
    config = GPTConfig(num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=8)
    model = random_gpt(config)
    save_gpt(str(tmp_path), model)
    found = described(tmp_path)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert (found.model["num_layers"], found.model["padded_vocab_size"]) == (1, PADDED_VOCAB)
    assert (found.step, found.stage, found.training["consumed_samples"]) == (50, "pretrain", 200)
    json.dumps(found.document(), allow_nan=False)


def test_tokens_are_given_if_samples_are_of_one_length(tmp_path: Path) -> None:
    save(str(tmp_path), {"model.a": torch.ones(1)})
    assert "tokens" not in described(tmp_path).training
    edited(
        tmp_path / "iter_0000050",
        "state.json",
        lambda state: state.update(consumed_train_samples=30, seq_length=128),
    )
    assert described(tmp_path).training["tokens"] == 3840


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.a.b", "model"),
        ("optimizer.exp_avg.a.b", "optimizer.exp_avg"),
        ("rng.rank0.torch", "rng"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind
