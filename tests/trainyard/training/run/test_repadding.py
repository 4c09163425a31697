"""A vocabulary padded otherwise than the checkpoint's, at every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.trainyard.pieces import Piece, assembled
from tests.trainyard.training.layouts.cases import MICRO_BATCH_SIZE, NUM_MICROBATCHES, VOCAB, Cut
from tests.trainyard.training.layouts.runs import (
    LEARNING_RATE,
    SEED,
    Tensors,
    batches,
    pieces,
    train_module_of,
)
from trainyard.checkpoint.load import Checkpoint, open_checkpoint
from trainyard.checkpoint.model_tensors import model_tensors
from trainyard.checkpoint.save import StepContents, save_step
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.gpt.config import GPTConfig
from trainyard.optim.build import params_dtype
from trainyard.optim.schedule import Rates
from trainyard.testing.pool import RankPool
from trainyard.training.loop.batch_size import BatchSize
from trainyard.training.loop.state import TrainState
from trainyard.training.loop.step import TrainModule
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.run.repadding import Repadding
from trainyard.training.run.restore import restore_training, restore_weights
from trainyard.training.run.resume_checks import repadding_of
from trainyard.training.run.tensors import optimizer_tensors

pytestmark = pytest.mark.slow

MORE = VOCAB + 16
"""Rows of another padding; both can be cut over four ranks."""
TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")


def held(train_module: TrainModule) -> list[Piece]:
    return pieces(model_tensors(train_module.chunks) | optimizer_tensors(train_module))


def save(cut: Cut, folder: Path, padded: int) -> Tensors:
    """Train a little in one process, and save."""
    train_module = train_module_of(cut, padded)
    size = BatchSize(NUM_MICROBATCHES * MICRO_BATCH_SIZE, MICRO_BATCH_SIZE, 1)
    rates = Rates(LEARNING_RATE, 0.1, LEARNING_RATE)
    train_module.step(1, size, batches(cut, 1, train_module.groups), rates)
    tensors = model_tensors(train_module.chunks) | optimizer_tensors(train_module)
    state = TrainState(step=1, num_updates=1).state_dict()
    save_step(str(folder), 1, tensors, StepContents(state, {}, {}, "11ae", "test"))
    return assembled(held(train_module))


def load(cut: Cut, folder: str, theirs: int, ours: int, finetune: bool = False) -> list[Piece]:
    """On a rank: a fresh model with so many rows, filled."""
    train_module = train_module_of(cut, ours)
    with torch.no_grad():
        for chunk in train_module.chunks:
            for parameter in chunk.parameters():
                parameter.fill_(7.0)  # nothing may be left as it was
        for box in train_module.optimizer.state_boxes():
            box.tensor.fill_(7.0)
    repadding = Repadding(theirs, ours, cut.model, SEED, params_dtype(cut.precision))
    with open_checkpoint(folder) as checkpoint:
        if finetune:
            restore_weights(checkpoint, train_module, repadding)
        else:
            restore_training(checkpoint, train_module, repadding)
    return held(train_module)


def is_table(name: str) -> bool:
    return name.endswith(TABLES)


CUTS = {
    "tied": Cut(),
    "untied": Cut(tied=False, kind="llama"),
    "bf16": Cut(bf16=True, tied=False),
}


@pytest.mark.parametrize("name", CUTS)
def test_new_rows_have_initial_weights_and_zero_moments(name: str, tmp_path: Path) -> None:
    cut = CUTS[name]
    before = save(cut, tmp_path, VOCAB)
    found = assembled(load(cut, str(tmp_path), VOCAB, MORE))
    initial = assembled(held(train_module_of(cut, MORE)))
    assert found.keys() == before.keys() == initial.keys()
    tables = [name for name in found if is_table(name)]
    assert len(tables) == (1 if cut.tied else 2) * (4 if cut.bf16 else 3)
    for name, tensor in found.items():
        if name not in tables:
            assert torch.equal(tensor, before[name]), name
            continue
        assert torch.equal(tensor[:VOCAB], before[name]), name
        expected = torch.zeros(()) if ".exp_avg" in name else initial[name][VOCAB:]
        assert torch.equal(tensor[VOCAB:], expected.expand_as(tensor[VOCAB:])), name
    weights = assembled(load(cut, str(tmp_path), VOCAB, MORE, finetune=True))
    for name in model_names(found):
        assert torch.equal(weights[name], found[name]), name


def model_names(tensors: Tensors) -> list[str]:
    return [name for name in tensors if name.startswith("model.")]


@pytest.mark.parametrize("name", CUTS)
def test_fewer_rows_and_back_only_draws_the_padding_again(name: str, tmp_path: Path) -> None:
    cut = CUTS[name]
    before = save(cut, tmp_path / "more", MORE)
    fewer = assembled(load(cut, str(tmp_path / "more"), MORE, VOCAB))
    for name, tensor in fewer.items():
        kept = before[name][:VOCAB] if is_table(name) else before[name]
        assert torch.equal(tensor, kept), name


def test_repadding_works_between_fp32_and_16_bits(tmp_path: Path) -> None:
    cut = CUTS["bf16"]
    before = save(replace(cut, bf16=False), tmp_path, VOCAB)
    found = assembled(load(cut, str(tmp_path), VOCAB, MORE))
    initial = assembled(held(train_module_of(cut, MORE)))
    for table in TABLES:
        main = found[f"optimizer.param.{table}"]
        assert torch.equal(main[:VOCAB], before[f"model.{table}"])
        assert torch.equal(main[VOCAB:], initial[f"optimizer.param.{table}"][VOCAB:])
        assert torch.equal(found[f"model.{table}"], main.bfloat16())


LAYOUTS = [
    Cut(tensor="tp2", tied=False),
    pytest.param(Cut(dp=2, reduction="zero"), marks=pytest.mark.slow),
    Cut(dp=2, reduction="optim_grads_params", tied=False),
    pytest.param(Cut(pp=2, bf16=True), marks=pytest.mark.slow),
    pytest.param(Cut(tensor="tp4 sp", dp=2, reduction="zero", bf16=True), marks=pytest.mark.slow),
    pytest.param(Cut(tensor="tp2", pp=2, tied=False, bf16=True), marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("cut", LAYOUTS, ids=str)
def test_every_layout_has_the_same_rows(cut: Cut, ranks: RankPool, tmp_path: Path) -> None:
    save(cut.alone(), tmp_path, VOCAB)
    for ours in (MORE, VOCAB - 8):
        expected = assembled(load(cut.alone(), str(tmp_path), VOCAB, ours))
        shares = ranks.run(load, cut.world_size, cut, str(tmp_path), VOCAB, ours)
        found = assembled([piece for share in shares for piece in share])
        assert found.keys() == expected.keys()
        different = [n for n, tensor in found.items() if not torch.equal(tensor, expected[n])]
        assert not different


def test_another_model_is_refused(tmp_path: Path) -> None:
    save(Cut(), tmp_path, VOCAB)
    with pytest.raises(ArtifactError, match="of another shape"):
        load(Cut(kind="llama"), str(tmp_path), VOCAB + 1, MORE)


# --- what is refused ----------------------------------------------------------------------------


def decide(tokens: int, padded: int, tp: int = 1, extra: int = 0) -> Repadding | None:
    """For a checkpoint of 1001 tokens in 1024 rows."""
    document = {"vocab_size": 1001, "padded_vocab_size": 1024}
    checkpoint = cast(Checkpoint, SimpleNamespace(config=document, url="run/iter_0000003"))
    model = GPTConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=8)
    parts: dict[str, Any] = {
        "model": model,
        "parallel": SimpleNamespace(tensor_model_parallel_size=tp),
        "training": SimpleNamespace(seed=SEED),
        "tokenizer": SimpleNamespace(num_extra_ids=extra),
    }
    config = cast(PretrainConfig, SimpleNamespace(**parts))
    return repadding_of(checkpoint, config, tokens, padded, torch.float32)


def test_only_the_padding_may_differ() -> None:
    assert decide(1001, 1024) is None
    assert decide(1002, 1024) is None  # the tokenizer itself is compared elsewhere
    found = decide(1001, 1536)
    assert found is not None
    assert (found.theirs, found.ours) == (1024, 1536)
    with pytest.raises(ConfigError, match=r"1024 rows \(1001 tokens, padded\), .* 1408 \(1400 tok"):
        decide(1400, 1408)
    with pytest.raises(ConfigError, match="--make-vocab-size-divisible-by 512 in another run"):
        decide(900, 1280, tp=2)
    with pytest.raises(ConfigError, match="--vocab-extra-ids 0, as this tokenizer has 100 extra"):
        decide(1101, 1152, extra=100)
