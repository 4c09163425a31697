"""GPT samples against Megatron-LM's own, and their masks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.vectors import GOLDEN
from trainyard.corpus.indexed import IndexedDataset, IndexedWriter
from trainyard.datasets.gpt import (
    GPTDataset,
    SampleFormat,
    build_sample,
    positions_in_documents,
)
from trainyard.errors import DataError

EOD = 999
FORM = SampleFormat(seq_length=16, seed=1234, vocab_size=1000, eod=EOD)


def write_pair(prefix: Path, lengths: list[int], first: int = 0) -> str:
    """Token k of the concatenation is (first + k) % 1000."""
    tokens = (first + np.arange(sum(lengths))) % 1000
    with open(f"{prefix}.bin", "wb") as bin_file, open(f"{prefix}.idx", "wb") as idx_file:
        writer = IndexedWriter(bin_file, np.uint16)
        for document in np.split(tokens, np.cumsum(lengths)[:-1]):
            writer.add_document([document])
        writer.write_index(idx_file)
    return str(prefix)


def sample_of(text: list[int], form: SampleFormat) -> dict[str, list[float]]:
    n = len(text) - 1
    sample = build_sample(np.array(text), form, np.arange(n), np.ones(n, np.float32))
    return {key: values.tolist() for key, values in sample.items()}


def test_first_samples_equal_megatrons(tmp_path: Path) -> None:
    golden = json.loads((GOLDEN / "megatron_vectors.json").read_text())["gpt"]
    indexed = IndexedDataset(write_pair(tmp_path / "t", golden["doc_lengths"]))
    documents = np.arange(len(indexed), dtype=np.int32)
    for case in golden["cases"]:
        drop = case["split"] != "valid" or case["drop_last_partial_validation_sequence"]
        dataset = GPTDataset(indexed, documents, case["num_samples"], FORM, drop)
        assert dataset[0]["tokens"].tolist() == case["first_sample_tokens"]
        assert dataset[0]["labels"].tolist() == case["first_sample_labels"]


def test_the_samples_of_an_epoch_serve_every_token_once(tmp_path: Path) -> None:
    indexed = IndexedDataset(write_pair(tmp_path / "t", [40, 3, 90, 1, 27]))
    dataset = GPTDataset(indexed, np.arange(5, dtype=np.int32), None, FORM)
    served = np.concatenate([dataset[i]["tokens"] for i in range(len(dataset))])
    assert len(np.unique(served)) == len(served) == 160  # of 161, the last is a label only


def test_a_last_partial_sample_is_padded_and_masked(tmp_path: Path) -> None:
    indexed = IndexedDataset(write_pair(tmp_path / "t", [20]))
    dataset = GPTDataset(indexed, np.arange(1, dtype=np.int32), None, FORM, drop_last_partial=False)
    samples = [dataset[i] for i in range(len(dataset))]
    assert sorted(s["loss_mask"].sum() for s in samples) == [3.0, 16.0]
    partial = min(samples, key=lambda s: s["loss_mask"].sum())
    assert partial["tokens"][:4].tolist() == [16, 17, 18, 19]
    assert not partial["tokens"][4:].any()
    assert not partial["labels"][3:].any()


def test_padding_does_not_count_and_becomes_zero() -> None:
    sample = sample_of([5, 6, 7, 7], SampleFormat(3, 1, 1000, EOD, pad=7))
    assert sample["tokens"] == [5, 6, 0]
    assert sample["labels"] == [6, 0, 0]
    assert sample["loss_mask"] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tokens_that_are_no_whole_numbers_are_refused(tmp_path: Path, dtype: type) -> None:
    prefix = tmp_path / "t"
    with open(f"{prefix}.bin", "wb") as bin_file, open(f"{prefix}.idx", "wb") as idx_file:
        writer = IndexedWriter(bin_file, dtype)
        writer.add_document([np.arange(40.0)])
        writer.write_index(idx_file)
    indexed = IndexedDataset(str(prefix))
    with pytest.raises(DataError, match=r"t\.idx: the tokens are stored as float"):
        GPTDataset(indexed, np.arange(1, dtype=np.int32), None, FORM)


def test_a_piece_shorter_than_asked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexed = IndexedDataset(write_pair(tmp_path / "t", [40, 3, 90]))
    dataset = GPTDataset(indexed, np.arange(3, dtype=np.int32), None, FORM)
    monkeypatch.setattr(indexed, "_tokens", indexed._tokens[:60])
    with pytest.raises(DataError, match=r"t\.bin: sequence 2 gave \d+ of \d+ tokens"):
        [dataset[index] for index in range(len(dataset))]


def test_end_of_document_resets_positions_and_loss_if_asked() -> None:
    text = [1, EOD, 2, 3, EOD, EOD, 4]
    plain = sample_of(text, FORM)
    assert plain["loss_mask"] == [1.0] * 6
    assert plain["position_ids"] == [0, 1, 2, 3, 4, 5]
    form = SampleFormat(6, 1, 1000, EOD, reset_position_ids=True, eod_mask_loss=True)
    reset = sample_of(text, form)
    assert reset["loss_mask"] == [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert reset["position_ids"] == [0, 1, 0, 1, 2, 0]
    assert positions_in_documents(np.array([EOD, 1, 2]), EOD).tolist() == [0, 0, 1]
