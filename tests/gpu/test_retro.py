"""Retro on a GPU: logits, gradients and tokens generated with neighbours are those of the CPU, and
a training in bf16 has the losses of one in fp32.

python -m pytest -m gpu tests/gpu/test_retro.py"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("h5py")

from tests.trainyard.models.retro.small_retro import CHUNK, build, some_neighbors, some_tokens
from tests.trainyard.retrieval.corpora import LENGTH
from tests.trainyard.retrieval.samples import SEQ_LENGTH, Yard, make_yard
from tests.trainyard.retrieval.tables import random_table, write_table
from tests.trainyard.training.resumed_runs import go, ledger
from trainyard.inference.neighbors import generate_with_neighbors
from trainyard.models.retro.chunks import Neighbors
from trainyard.models.retro.model import RetroModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
SAME = {"rtol": 1e-3, "atol": 1e-3}
"""fp32 in other orders of addition."""
BF16_ERROR = 0.04
"""Of the norm: bf16 has 8 bits, over four layers."""

WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "init_method_std": 0.1,
    "retro_encoder_hidden_dropout": 0.0,
    "retro_encoder_attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
TRAINING: dict[str, Any] = {
    **WIDE,
    "model_type": "retro",
    "num_layers": 4,
    "seq_length": SEQ_LENGTH,
    "retro_chunk_length": LENGTH,
    "retro_cross_attention_layers": [2, 4],
    "tokenizer_type": "ByteLevelTokenizer",
    "vocab_size": None,
    "micro_batch_size": 4,
    "global_batch_size": 4,
    "train_iters": 20,
    "eval_interval": 20,
    "eval_iters": 1,
    "lr": 1e-3,
    "device": DEVICE,
}


def logits_and_gradients(model: RetroModel, device: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Of some tokens with neighbours of every length, on the CPU and in fp32."""
    near = some_neighbors(model.config)
    there = Neighbors(near.tokens.to(device), near.lengths.to(device))
    logits = model(some_tokens().to(device), neighbors=there)
    logits.float().logsumexp(dim=-1).sum().backward()
    gradients = {
        name: parameter.grad.float().cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return logits.detach().float().cpu(), gradients


def test_logits_and_gradients_are_those_of_the_cpu() -> None:
    wanted, gradients = logits_and_gradients(build(**WIDE), "cpu")
    found, theirs = logits_and_gradients(build(**WIDE).to(DEVICE), DEVICE)
    torch.testing.assert_close(found, wanted, **SAME)
    assert theirs.keys() == gradients.keys()
    assert any("cross_attention" in name for name in theirs)
    for name, gradient in gradients.items():
        torch.testing.assert_close(theirs[name], gradient, **SAME, msg=name)


def test_logits_in_bf16_are_near_those_in_fp32() -> None:
    wanted, gradients = logits_and_gradients(build(**WIDE), "cpu")
    found, theirs = logits_and_gradients(build(**WIDE).to(DEVICE, torch.bfloat16), DEVICE)
    assert (found - wanted).norm() < BF16_ERROR * wanted.norm()
    both = [torch.cat([part.flatten() for part in one.values()]) for one in (theirs, gradients)]
    assert (both[0] - both[1]).norm() < 2 * BF16_ERROR * both[1].norm()


def test_generation_with_neighbours_has_the_tokens_of_the_cpu() -> None:
    prompt = some_tokens(batch=1)[0].tolist()[: 2 * CHUNK + 1]
    chunks = [[[5, 6, 7, 8, 9], [11, 12]], [[], [21, 22, 23, 24]]]
    texts = {}
    for device in ("cpu", DEVICE):
        model = build(**WIDE).requires_grad_(False).to(device)
        texts[device] = generate_with_neighbors(model, prompt, chunks, max_new_tokens=6)
        texts[f"{device} alone"] = generate_with_neighbors(
            model, prompt, [[], []], max_new_tokens=6
        )
    assert texts[DEVICE] == texts["cpu"]
    assert texts[f"{DEVICE} alone"] == texts["cpu alone"]
    assert texts["cpu"] != texts["cpu alone"], "neighbours change the answer"


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Yard:
    """A database, and tables for the samples of the training."""
    yard = make_yard(tmp_path_factory.mktemp("retro"))
    yard.options.update({"train_iters": 20, "eval_interval": 20})
    for seed, split in enumerate(("train", "valid")):
        write_table(yard, split, random_table(yard, split, 3, seed))
    return yard


def train(yard: Yard, save: Path, **options: Any) -> list[dict[str, Any]]:
    """The ledger of a training with neighbours."""
    data = {
        "data_path": list(yard.options["data_path"]),
        "split": yard.options["split"],
        "retro_db": str(yard.folder / "db"),
        "retro_train_neighbors": str(yard.folder / "neighbors-train"),
        "retro_valid_neighbors": str(yard.folder / "neighbors-valid"),
    }
    assert go("", save, **TRAINING | data | options) == "finished"
    return ledger(save)


def test_a_training_in_bf16_has_the_losses_of_one_in_fp32(yard: Yard, tmp_path: Path) -> None:
    plain = train(yard, tmp_path / "plain", compile_layers="off")
    found = train(yard, tmp_path / "bf16", bf16=True)
    assert plain[-1]["lm_loss"] < 0.95 * plain[0]["lm_loss"], "nothing was learnt"
    for one, other in zip(found, plain, strict=True):
        assert one["lm_loss"] == pytest.approx(other["lm_loss"], rel=0.02), one["step"]
    assert found[-1]["validation_loss"] == pytest.approx(plain[-1]["validation_loss"], rel=0.02)
