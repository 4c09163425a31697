"""Chunks of training samples: the tokens and documents that the training itself reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.trainyard.corpus.token_files import write_tokens
from trainyard.datasets.build import build_datasets
from trainyard.datasets.config import DataConfig
from trainyard.datasets.gpt import BlendedDataset, GPTDataset
from trainyard.datasets.sample_format import SampleFormat
from trainyard.datasets.trace import pieces
from trainyard.errors import ConfigError
from trainyard.retrieval.pretraining_chunks import NO_TOKEN, PretrainingChunks

LENGTH, SEQ_LENGTH, SEED = 4, 16, 7


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Documents of several sequences, some empty; every token of both is another one."""
    folder, rng, token, prefixes = tmp_path_factory.mktemp("c"), np.random.default_rng(0), 0, []
    for name in ("a", "b"):
        documents = []
        for _ in range(40):
            lengths = rng.integers(0, 9, rng.integers(0, 4)).tolist()
            documents.append([np.arange(token := token + 9, token + n) for n in lengths])
        prefixes.append(write_tokens(folder / name, documents, np.int32))
    return prefixes


def opened(data: DataConfig, split: str = "train", **more: Any) -> PretrainingChunks:
    given = {"sizes": (60, 6, 3), "seq_length": SEQ_LENGTH, "seed": SEED, "chunk_length": LENGTH}
    return PretrainingChunks.open(data, split, **{**given, **more})


def blends(corpora: list[str]) -> list[DataConfig]:
    a, b = corpora
    return [
        DataConfig(data_path=(a,), split="70,20,10"),
        DataConfig(data_path=("0.3", a, "0.7", b), split="70,20,10"),
        DataConfig(data_path=("1", a, "2", b, "1", a), split="70,20,10"),
        DataConfig(train_data_path=("1", b, "1", a), valid_data_path=(a,), test_data_path=("1", b)),
    ]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_chunks_are_the_tokens_and_documents_of_the_training_samples(
    corpora: list[str], number: int, split: str
) -> None:
    data = blends(corpora)[number]
    chunks = opened(data, split)
    form = SampleFormat(SEQ_LENGTH, SEED, vocab_size=10**6, eod=0)
    built = build_datasets(data, form, (60, 6, 3))
    dataset = {"train": built.train, **dict(built.valid), **dict(built.test)}[split]
    assert isinstance(dataset, GPTDataset | BlendedDataset)
    assert len(chunks) == chunks.num_samples * SEQ_LENGTH // LENGTH
    assert chunks.num_samples == min(len(dataset), {"train": 60, "valid": 6, "test": 3}[split])

    rows = chunks.token_rows(0, len(chunks))
    documents = set()
    for sample in range(chunks.num_samples):
        text = dataset[sample]["tokens"]
        np.testing.assert_array_equal(rows.reshape(-1, SEQ_LENGTH)[sample], text)
        for piece in pieces(dataset, sample):
            documents.add((sample, chunks.prefixes.index(piece.prefix), piece.document))
    found = chunks.documents(0, chunks.num_samples).tolist()
    assert found == [list(row) for row in sorted(documents)]
    np.testing.assert_array_equal(chunks.token_rows(3, 6), rows[3:6])
    assert chunks.documents(1, 3).tolist() == [row for row in found if 1 <= row[0] < 3]


def test_padding_of_a_partial_sample_is_no_token(corpora: list[str]) -> None:
    data = DataConfig(
        data_path=(corpora[0],),
        split="50,50,0",
        full_validation=True,
        drop_last_partial_validation_sequence=False,
    )
    chunks = opened(data, "valid")
    rows = chunks.token_rows(0, len(chunks))
    assert (rows == NO_TOKEN).any(axis=1).sum() < chunks.chunks_per_sample
    assert (rows == NO_TOKEN).any()
    assert (rows[:, 0] != NO_TOKEN).sum() > len(rows) - chunks.chunks_per_sample


def test_the_identity_changes_with_all_that_changes_the_samples(corpora: list[str]) -> None:
    a, b = corpora
    one = DataConfig(data_path=("1", a, "1", b), split="70,20,10")
    same = opened(one).identity()
    assert opened(replace(one, data_path=("2", a, "2", b))).identity() == same
    assert opened(one, sizes=(60, 0, 0)).identity() == same
    others = [
        opened(replace(one, data_path=("1", a, "2", b))).identity(),
        opened(replace(one, data_path=("1", b, "1", a))).identity(),
        opened(replace(one, split="50,25,25")).identity(),
        opened(one, seed=8).identity(),
        opened(one, sizes=(61, 6, 3)).identity(),
        opened(one, chunk_length=8).identity(),
        opened(one, "valid").identity(),
    ]
    assert same not in others
    assert len(set(others)) == len(others)


@pytest.mark.parametrize(
    ("data", "more", "words"),
    [
        ({"mock_data": True}, {}, "--mock-data has no documents"),
        ({}, {"chunk_length": 5}, r"--seq-length \(16\) must be divisible by .* \(5\)"),
        ({}, {"split": "valid", "sizes": (60, 0, 0)}, "--eval-iters 0: .* no valid samples"),
        ({"split": "1,1,0"}, {"split": "test"}, "leave no test data"),
    ],
)
def test_samples_without_neighbours_are_refused(
    corpora: list[str], data: dict[str, Any], more: dict[str, Any], words: str
) -> None:
    given = {} if "mock_data" in data else {"data_path": (corpora[0],)}
    with pytest.raises(ConfigError, match=words):
        opened(DataConfig(**given, **data), **more)
