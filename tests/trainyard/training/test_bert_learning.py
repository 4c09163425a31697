"""A BERT that is trained on real text for some hundred steps knows more of hidden words than their
frequencies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.trainyard.training.masked_runs import (
    LENGTH,
    TOKENIZER_TYPE,
    held_out_documents,
    is_above_zero,
    real_corpus,
    train,
    unigram_losses,
)
from trainyard.checkpoint.model import load_model
from trainyard.corpus.indexed import IndexedDataset
from trainyard.datasets.loader import collate
from trainyard.datasets.masked.bert import BERTDataset, BertFormat
from trainyard.datasets.masked.config import MaskedConfig
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.full]


def test_a_bert_beats_the_unigram_at_hidden_words(tmp_path: Path) -> None:
    vocab_file, tokens = real_corpus(tmp_path)
    options = {"tokenizer_type": TOKENIZER_TYPE, "vocab_file": vocab_file}
    train(tokens, tmp_path / "run", model_type="bert", **options)

    tokenizer = build_tokenizer(TokenizerConfig(**options))
    indexed = IndexedDataset(tokens)
    unigram = unigram_losses(indexed, tokenizer.vocab_size)
    sample_format = BertFormat.of(tokenizer, MaskedConfig(), LENGTH, 1234)
    held_out = BERTDataset(indexed, held_out_documents(indexed), None, sample_format)
    model = load_model(str(tmp_path / "run"), model_type="bert").model
    batch = collate([held_out[i] for i in range(min(400, len(held_out)))])
    with torch.no_grad():
        words = model(batch["text"], batch["padding_mask"], batch["types"]).words
    asked = batch["labels"] >= 0
    labels = batch["labels"][asked]
    found = functional.cross_entropy(words[asked], labels, reduction="none").double()
    assert is_above_zero(unigram[labels] - found)
