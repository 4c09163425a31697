"""A T5 that is trained on real text for some hundred steps knows more of hidden spans than the
frequencies of words, and needs its encoder for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.trainyard.training.resumed_runs import go, ledger
from tests.trainyard.training.test_bert_learning import corpus
from trainyard.checkpoint.model import load_model
from trainyard.corpus.indexed import IndexedDataset
from trainyard.datasets.loader import collate
from trainyard.datasets.masked.config import MaskedConfig
from trainyard.datasets.masked.t5 import T5Dataset, T5Format
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.full]

LENGTH, DECODER, SENTINELS = 64, 24, 20


def test_a_t5_beats_the_unigram_at_hidden_spans(tmp_path: Path) -> None:
    vocab_file, tokens = corpus(tmp_path)
    options = {
        "tokenizer_type": "BertWordPieceLowerCase",
        "vocab_file": vocab_file,
        "vocab_extra_ids": SENTINELS,
    }
    outcome = go(
        tokens,
        tmp_path / "run",
        **options,
        model_type="t5",
        vocab_size=None,
        num_layers=2,
        hidden_size=96,
        num_attention_heads=4,
        seq_length=LENGTH,
        decoder_seq_length=DECODER,
        init_method_std=0.02,
        hidden_dropout=0.0,
        micro_batch_size=16,
        global_batch_size=16,
        train_iters=500,
        eval_interval=500,
        lr=2e-3,
        adam_eps=1e-8,
        lr_warmup_iters=50,
        split="90,10,0",
    )
    assert outcome == "finished"
    losses = [line["lm_loss"] for line in ledger(tmp_path / "run")]
    assert np.mean(losses[-50:]) < np.mean(losses[:10]) - 1.0

    tokenizer = build_tokenizer(TokenizerConfig(**options))
    indexed = IndexedDataset(tokens)
    bounds = indexed.document_indices
    first = round(0.9 * (len(bounds) - 1))
    counts = np.ones(tokenizer.vocab_size)
    for number in range(int(bounds[first])):
        counts += np.bincount(indexed.get(number), minlength=len(counts))
    unigram = torch.tensor(-np.log(counts / counts.sum()))
    sample_format = T5Format.of(tokenizer, MaskedConfig(), LENGTH, DECODER, 1234)
    held_out = T5Dataset(indexed, range(first, len(bounds) - 1), None, sample_format)
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
        assert gain.mean() > 5 * float(gain.std()) / len(gain) ** 0.5
