"""Runs of models that learn hidden words of sentences, BERT and T5: small ones on random words, and
longer ones on real text."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.trainyard.corpus.token_files import write_tokens
from tests.trainyard.training.resumed_runs import go, ledger
from trainyard.corpus.indexed import IndexedDataset
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TOKENIZER_TYPE = "BertWordPieceLowerCase"

# --- random words ---------------------------------------------------------------------------------

WORDS = [*SPECIAL, *(f"{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(300))]

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 32,
    "tokenizer_type": TOKENIZER_TYPE,
    "vocab_size": None,
    "global_batch_size": 4,
    "train_iters": 8,
    "eval_interval": 4,
    "save_interval": 3,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "log_interval": 2,
}


def random_corpus(folder: Path, fewest: int) -> dict[str, str]:
    """A vocabulary, and documents of at least so many sentences of its words."""
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    random = np.random.RandomState(1)
    documents = [
        [
            random.randint(len(SPECIAL), len(WORDS), random.randint(3, 12))
            for _ in range(random.randint(fewest, 9))
        ]
        for _ in range(60)
    ]
    write_tokens(folder / "tokens", documents)
    return {"vocab_file": str(folder / "vocab.txt"), "tokens": str(folder / "tokens")}


def run(corpus: dict[str, str], save: Path, **options: Any) -> str:
    """A leg of a run on a corpus of random words; how it ended."""
    return go(corpus["tokens"], save, vocab_file=corpus["vocab_file"], **options)


# --- real text ------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[3]
NUM_WORDS = 800
LENGTH = 64

LEARNS: dict[str, Any] = {
    "vocab_size": None,
    "num_layers": 2,
    "hidden_size": 96,
    "num_attention_heads": 4,
    "seq_length": LENGTH,
    "init_method_std": 0.02,
    "hidden_dropout": 0.0,
    "micro_batch_size": 16,
    "global_batch_size": 16,
    "train_iters": 500,
    "eval_interval": 500,
    "lr": 2e-3,
    "adam_eps": 1e-8,
    "lr_warmup_iters": 50,
    "split": "90,10,0",
}


def real_corpus(folder: Path) -> tuple[str, str]:
    """Vocabulary and token file of the sentences of this project's pages and docstrings."""
    sources = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "trainyard").rglob("*.py"))]
    paragraphs = [
        " ".join(part.split())
        for file in sources
        for part in re.split(r"\n\s*\n", file.read_text())
        if len(part) > 100
    ]
    words = Counter(re.findall(r"[a-z]+|[^a-z\s]", " ".join(paragraphs).lower()))
    letters = sorted({letter for word in words for letter in word})
    vocabulary = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
    vocabulary += [word for word, _ in words.most_common(NUM_WORDS) if len(word) > 1]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    tokenizer = build_tokenizer(
        TokenizerConfig(tokenizer_type=TOKENIZER_TYPE, vocab_file=str(folder / "vocab.txt"))
    )
    documents = [
        [np.array(tokenizer.encode(s)) for s in re.split(r"(?<=[.:;]) ", text) if s.strip()]
        for text in paragraphs
    ]
    order = np.random.RandomState(1).permutation(len(documents))
    write_tokens(folder / "text", [documents[i] for i in order])
    return str(folder / "vocab.txt"), str(folder / "text")


def train(tokens: str, save: Path, **options: Any) -> None:
    """A run in which the loss falls by at least one nat."""
    assert go(tokens, save, **LEARNS, **options) == "finished"
    losses = [line["lm_loss"] for line in ledger(save)]
    assert np.mean(losses[-50:]) < np.mean(losses[:10]) - 1.0


def held_out_documents(indexed: IndexedDataset) -> range:
    """The documents that LEARNS does not train on."""
    num_documents = len(indexed.document_indices) - 1
    return range(round(0.9 * num_documents), num_documents)


def unigram_losses(indexed: IndexedDataset, vocab_size: int) -> Tensor:
    """-ln p of each token, (vocab_size), by its frequency in the documents trained on."""
    counts = np.ones(vocab_size)
    for number in range(int(indexed.document_indices[held_out_documents(indexed).start])):
        counts += np.bincount(indexed.get(number), minlength=vocab_size)
    return torch.tensor(-np.log(counts / counts.sum()))


def is_above_zero(gain: Tensor) -> bool:
    """Whether a mean is above zero by five of its standard errors."""
    return bool(gain.mean() > 5 * float(gain.std()) / len(gain) ** 0.5)
