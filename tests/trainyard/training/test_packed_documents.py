"""Documents packed into a sample cost what they cost alone, when masks and positions begin anew."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from trainyard.corpus.indexed import IndexedDataset, IndexedWriter
from trainyard.datasets.gpt import GPTDataset, SampleFormat
from trainyard.datasets.loader import Batch, collate
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import init_parameters
from trainyard.parallel.groups import ALONE
from trainyard.training.loop.microbatch import Preparation

EOD = 31
LENGTH = 24
LENGTHS = [7, 5, 12, 3, 20, 9, 14, 6]


def build_model(position: str) -> GPTModel:
    model = GPTModel(
        GPTConfig(
            num_layers=2,
            hidden_size=16,
            num_attention_heads=2,
            seq_length=LENGTH,
            position_embedding_type=position,  # type: ignore[arg-type]
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        32,
    )
    init_parameters(model, 3)
    return model


def packed_batch(prefix: Path, by_file: bool) -> Batch:
    """Samples of documents that end with EOD; by_file: of documents that do not."""
    random = np.random.RandomState(1)
    with open(f"{prefix}.bin", "wb") as bin_file, open(f"{prefix}.idx", "wb") as idx_file:
        writer = IndexedWriter(bin_file, np.uint16)
        for length in LENGTHS:
            tokens = random.randint(0, EOD, length)
            tokens[-1] = tokens[-1] if by_file else EOD
            writer.add_document([tokens])
        writer.write_index(idx_file)
    form = SampleFormat(
        LENGTH,
        seed=1,
        vocab_size=32,
        eod=EOD,
        reset_position_ids=not by_file,
        reset_attention_mask=not by_file,
        inter_document_masking=by_file,
    )
    ids = np.arange(len(LENGTHS), dtype=np.int32)
    dataset = GPTDataset(IndexedDataset(str(prefix)), ids, None, form)
    return collate([dataset[i] for i in range(len(dataset))])


def losses_of(model: GPTModel, batch: Batch, own_positions: bool = False) -> torch.Tensor:
    ready = Preparation(ALONE, torch.device("cpu"), own_positions).ready(batch)
    return model.forward_step(None, ready)


@pytest.mark.parametrize("by_file", [False, True], ids=["by EOD", "by file"])
@pytest.mark.parametrize("position", ["rope", "learned_absolute"])
def test_packed_documents_have_the_losses_of_separate_ones(
    tmp_path: Path, position: str, by_file: bool
) -> None:
    model, batch = build_model(position), packed_batch(tmp_path / "t", by_file)
    together = losses_of(model, batch, own_positions=True)
    for row, bounds in enumerate(batch["cu_seqlens"].tolist()):
        documents = sorted(set(bounds))
        assert len(documents) > 2
        for first, last in itertools.pairwise(documents):
            tokens = batch["tokens"][row : row + 1, first:last]
            labels = batch["labels"][row : row + 1, first:last]
            alone = model.loss(tokens, labels)
            torch.testing.assert_close(together[row : row + 1, first:last], alone)


def test_without_bounds_documents_attend_to_each_other(tmp_path: Path) -> None:
    model, batch = build_model("rope"), packed_batch(tmp_path / "t", by_file=False)
    apart = losses_of(model, batch)
    del batch["cu_seqlens"]
    assert not torch.allclose(losses_of(model, batch), apart)
