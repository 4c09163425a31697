"""A BERT that is trained on real text for some hundred steps knows more of hidden words than their
frequencies."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.trainyard.corpus.token_files import write_tokens
from tests.trainyard.training.resumed_runs import go, ledger
from trainyard.checkpoint.model import load_model
from trainyard.corpus.indexed import IndexedDataset
from trainyard.datasets.loader import collate
from trainyard.datasets.masked.bert import BERTDataset, BertFormat
from trainyard.datasets.masked.config import MaskedConfig
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.full]

PAGES = sorted((Path(__file__).parents[3] / "docs").glob("*.md"))
WORDS = 800
LENGTH = 64


def corpus(folder: Path) -> tuple[str, str]:
    """Vocabulary and token file of the sentences of this project's pages and docstrings."""
    sources = [*PAGES, *sorted((Path(__file__).parents[3] / "trainyard").rglob("*.py"))]
    paragraphs = [
        " ".join(part.split())
        for file in sources
        for part in re.split(r"\n\s*\n", file.read_text())
        if len(part) > 100
    ]
    words = Counter(re.findall(r"[a-z]+|[^a-z\s]", " ".join(paragraphs).lower()))
    letters = sorted({letter for word in words for letter in word})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]
    vocabulary += [f"##{letter}" for letter in letters]
    vocabulary += [word for word, _ in words.most_common(WORDS) if len(word) > 1]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    tokenizer = build_tokenizer(
        TokenizerConfig(
            tokenizer_type="BertWordPieceLowerCase", vocab_file=str(folder / "vocab.txt")
        )
    )
    documents = [
        [np.array(tokenizer.encode(s)) for s in re.split(r"(?<=[.:;]) ", text) if s.strip()]
        for text in paragraphs
    ]
    order = np.random.RandomState(1).permutation(len(documents))
    write_tokens(folder / "text", [documents[i] for i in order])
    return str(folder / "vocab.txt"), str(folder / "text")


def test_a_bert_beats_the_unigram_at_hidden_words(tmp_path: Path) -> None:
    vocab_file, tokens = corpus(tmp_path)
    options = {"tokenizer_type": "BertWordPieceLowerCase", "vocab_file": vocab_file}
    outcome = go(
        tokens,
        tmp_path / "run",
        **options,
        model_type="bert",
        vocab_size=None,
        num_layers=2,
        hidden_size=96,
        num_attention_heads=4,
        seq_length=LENGTH,
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
    sample_format = BertFormat.of(tokenizer, MaskedConfig(), LENGTH, 1234)
    held_out = BERTDataset(indexed, range(first, len(bounds) - 1), None, sample_format)
    model = load_model(str(tmp_path / "run"), model_type="bert").model
    batch = collate([held_out[i] for i in range(min(400, len(held_out)))])
    with torch.no_grad():
        words = model(batch["text"], batch["padding_mask"], batch["types"]).words
    asked = batch["labels"] >= 0
    labels = batch["labels"][asked]
    found = functional.cross_entropy(words[asked], labels, reduction="none").double()
    gain = unigram[labels] - found
    error = float(gain.std()) / len(gain) ** 0.5
    assert gain.mean() > 5 * error
