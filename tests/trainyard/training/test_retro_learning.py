"""With true neighbours, a Retro learns to read them: its validation loss is clearly below that of a
GPT of the same size that sees the same tokens.

Every document is one of a few copies of random letters, of which a tenth differ. Nothing can be
said of its next letter but from another copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.trainyard.retrieval.corpora import LENGTH, build, write_corpus
from tests.trainyard.retrieval.samples import SEQ_LENGTH, Yard
from tests.trainyard.retrieval.tables import write_table
from tests.trainyard.training.resumed_runs import go, ledger
from trainyard.retrieval.pretraining_chunks import PretrainingChunks

pytestmark = [pytest.mark.slow, pytest.mark.full]

NUM_TEXTS, NUM_VALID = 600, 200
NOISE = 0.1
K = 2

DATA: dict[str, Any] = {
    "split": f"{2 * NUM_TEXTS},{NUM_VALID},0",
    "seq_length": SEQ_LENGTH,
    "global_batch_size": 32,
    "train_iters": 250,
    "eval_interval": 250,
    "eval_iters": 5,
}
MODEL: dict[str, Any] = {
    **DATA,
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "micro_batch_size": 32,
    "tokenizer_type": "ByteLevelTokenizer",
    "vocab_size": None,
    "init_method_std": 0.1,
    "hidden_dropout": 0.0,
    "lr": 3e-3,
    "adam_eps": 1e-8,
}
RETRO: dict[str, Any] = {
    **MODEL,
    "model_type": "retro",
    "retro_chunk_length": LENGTH,
    "retro_cross_attention_layers": [1, 2],
    "retro_encoder_hidden_dropout": 0.0,
    "retro_encoder_attention_dropout": 0.0,
}


def copies() -> list[str]:
    """Two copies of each text for training, then one more of some; as long as a sample, so that
    samples begin where documents do."""
    rng = np.random.default_rng(7)
    texts = rng.integers(26, size=(NUM_TEXTS, SEQ_LENGTH - 1))
    order = [*rng.permutation(np.repeat(np.arange(NUM_TEXTS), 2)), *range(NUM_VALID)]
    letters = texts[order]
    changed = rng.random(letters.shape) < NOISE
    letters = np.where(changed, rng.integers(26, size=letters.shape), letters)
    return [bytes(row.astype(np.uint8) + 97).decode() for row in letters]


def nearest(yard: Yard, chunks: PretrainingChunks) -> NDArray[np.int64]:
    """(n, k) chunks of the database with most letters in common, of other documents."""
    database = yard.database()
    numbers = np.arange(len(database))
    theirs = one_hot(database.token_rows(numbers, LENGTH, pad=0))
    documents = database.rows(numbers)[:, 1].astype(np.int64)
    found = []
    for sample in range(chunks.num_samples):
        start, stop = sample * 4, sample * 4 + 4
        common = one_hot(chunks.token_rows(start, stop)) @ theirs.T
        own = chunks.documents(sample, sample + 1)[:, 2]
        common[:, np.isin(documents, own)] = -1
        found.append(np.argsort(-common, axis=1, kind="stable")[:, :K])
    return np.concatenate(found)


def one_hot(tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    letters = np.arange(97, 123)
    return (tokens[:, :, None] == letters).reshape(len(tokens), -1).astype(np.float32)


def test_a_retro_with_true_neighbours_beats_a_gpt(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "text", copies())
    build(tmp_path, [prefix], retro_gpt_split=DATA["split"])
    yard = Yard(tmp_path, [prefix], {**DATA, "data_path": [prefix]})
    tables = {
        f"retro_{split}_neighbors": write_table(
            yard, split, nearest(yard, yard.chunks(split)), block=1 << 16
        )
        for split in ("train", "valid")
    }
    retro = RETRO | tables | {"retro_db": str(tmp_path / "db")}
    losses = []
    for name, options in (("gpt", MODEL), ("retro", retro)):
        assert go(prefix, tmp_path / name, **options) == "finished"
        losses.append(ledger(tmp_path / name)[-1]["validation_loss"])
    print("validation loss", losses)
    of_gpt, of_retro = losses
    assert of_retro < of_gpt - 1.0
