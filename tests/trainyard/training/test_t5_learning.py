"""A T5 that is trained on real text for some hundred steps knows more of hidden spans than the
frequencies of words, and needs its encoder for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
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
from trainyard.datasets.masked.config import MaskedConfig
from trainyard.datasets.masked.t5 import T5Dataset, T5Format
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.full]

DECODER, SENTINELS = 24, 20


def test_a_t5_beats_the_unigram_at_hidden_spans(tmp_path: Path) -> None:
    vocab_file, tokens = real_corpus(tmp_path)
    options = {
        "tokenizer_type": TOKENIZER_TYPE,
        "vocab_file": vocab_file,
        "vocab_extra_ids": SENTINELS,
    }
    train(tokens, tmp_path / "run", model_type="t5", decoder_seq_length=DECODER, **options)

    tokenizer = build_tokenizer(TokenizerConfig(**options))
    indexed = IndexedDataset(tokens)
    unigram = unigram_losses(indexed, tokenizer.vocab_size)
    sample_format = T5Format.of(tokenizer, MaskedConfig(), LENGTH, DECODER, 1234)
    held_out = T5Dataset(indexed, held_out_documents(indexed), None, sample_format)
    model = load_model(str(tmp_path / "run"), model_type="t5").model
    batch = collate([held_out[i] for i in range(min(400, len(held_out)))])
    labels = batch["labels"]
    known = torch.tensor([*sample_format.extra_ids, sample_format.eos])
    asked = (labels >= 0) & ~torch.isin(labels, known)  # words, neither sentinels nor the end

    def of_words(text: Tensor) -> Tensor:
        with torch.no_grad():
            logits = model(text, batch["text_dec"], batch["enc_mask"])
        losses = functional.cross_entropy(logits[asked], labels[asked], reduction="none")
        return losses.double()

    found, blind = of_words(batch["text_enc"]), of_words(batch["text_enc"].flip(0))
    for gain in (unigram[labels[asked]] - found, blind - found):
        assert is_above_zero(gain)
