"""GPT samples against Megatron-LM's own, and their masks."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.trainyard.corpus.token_files import write_tokens
from tests.vectors import GOLDEN
from trainyard.corpus.indexed import IndexedDataset
from trainyard.corpus.readers import MappedReader
from trainyard.datasets.blend import blend
from trainyard.datasets.gpt import (
    BlendedDataset,
    GPTDataset,
    Sample,
    SampleFormat,
)
from trainyard.datasets.mock import MockTokens
from trainyard.errors import DataError

EOD = 999
FORM = SampleFormat(seq_length=16, seed=1234, vocab_size=1000, eod=EOD)


def write_pair(prefix: Path, lengths: list[int], first: int = 0) -> str:
    """Token k of the concatenation is (first + k) % 1000."""
    tokens = (first + np.arange(sum(lengths))) % 1000
    documents = np.split(tokens, np.cumsum(lengths)[:-1])
    return write_tokens(prefix, [[document] for document in documents])


def test_first_samples_equal_megatrons(tmp_path: Path) -> None:
    golden = json.loads((GOLDEN / "megatron_vectors.json").read_text())["gpt"]
    indexed = IndexedDataset(write_pair(tmp_path / "t", golden["doc_lengths"]))
    documents = np.arange(len(indexed), dtype=np.int32)
    for case in golden["cases"]:
        drop = case["split"] != "valid" or case["drop_last_partial_validation_sequence"]
        dataset = GPTDataset(indexed, documents, case["num_samples"], FORM, drop)
        assert dataset[0]["tokens"].tolist() == case["first_sample_tokens"]
        assert dataset[0]["labels"].tolist() == case["first_sample_labels"]


def test_a_last_partial_sample_is_padded_and_masked(tmp_path: Path) -> None:
    indexed = IndexedDataset(write_pair(tmp_path / "t", [20]))
    dataset = GPTDataset(indexed, np.arange(1, dtype=np.int32), None, FORM, drop_last_partial=False)
    samples = [dataset[i] for i in range(len(dataset))]
    assert sorted(s["loss_mask"].sum() for s in samples) == [3.0, 16.0]
    partial = min(samples, key=lambda s: s["loss_mask"].sum())
    assert partial["tokens"][:4].tolist() == [16, 17, 18, 19]
    assert not partial["tokens"][4:].any()
    assert not partial["labels"][3:].any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tokens_that_are_no_whole_numbers_are_refused(tmp_path: Path, dtype: type) -> None:
    indexed = IndexedDataset(write_tokens(tmp_path / "t", [[np.arange(40.0)]], dtype))
    with pytest.raises(DataError, match=r"t\.idx: the tokens are stored as float"):
        GPTDataset(indexed, np.arange(1, dtype=np.int32), None, FORM)


def test_a_piece_too_short_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    indexed = IndexedDataset(write_pair(tmp_path / "t", [40, 3, 90]))
    dataset = GPTDataset(indexed, np.arange(3, dtype=np.int32), None, FORM)
    assert indexed.tokens is not None
    monkeypatch.setattr(indexed, "_reader", MappedReader(indexed.tokens[:60]))
    with pytest.raises(DataError, match=r"t\.bin: sequence 2 has only \d+ of \d+ tokens"):
        [dataset[index] for index in range(len(dataset))]


# --- whole batches ----------------------------------------------------------------------------


class Numbers(MockTokens):
    """Documents of given lengths; token k of all of them end to end is (first + k) % 1000."""

    prefix = "numbers"

    def __init__(self, lengths: list[int], first: int = 0, dtype: type = np.int64) -> None:
        self.dtype = np.dtype(dtype)
        self.sequence_lengths = np.array(lengths, np.int32)
        ends = np.cumsum(lengths, dtype=np.int64)
        self._begins = first + ends - self.sequence_lengths

    def get(self, i: int, offset: int = 0, length: int | None = None) -> NDArray[np.int64]:
        begin = self._begins[i]
        end = begin + self.sequence_lengths[i]
        stop = end if length is None else min(begin + offset + length, end)
        return (np.arange(begin + offset, stop) % 1000).astype(self.dtype)


def over(
    source: Numbers, sample_format: SampleFormat, num_samples: int | None = None, drop: bool = True
) -> GPTDataset:
    return GPTDataset(
        source, np.arange(len(source), dtype=np.int32), num_samples, sample_format, drop
    )


def same(one: Sample, other: Sample) -> bool:
    return list(one) == list(other) and all(
        np.array_equal(one[key], other[key]) and one[key].dtype == other[key].dtype for key in one
    )


document_lengths = st.lists(st.integers(0, 12), min_size=2, max_size=12).filter(
    lambda n: sum(n) > 9
)


@settings(deadline=None)
@given(document_lengths, st.integers(1, 8), st.booleans(), st.integers(1, 40) | st.none())
def test_serves_in_order(lengths: list[int], s: int, extra: bool, num_samples: int | None) -> None:
    source = Numbers(lengths)
    sample_format = SampleFormat(s, 7, 1000, EOD, extra_token=extra)
    dataset = over(source, sample_format, num_samples, drop=False)
    order = np.argsort(dataset.indices.shuffle_index)  # place of each sample before shuffling
    texts = [dataset.text(int(place)) for place in order]
    stored = np.concatenate([source.get(d) for d in dataset.indices.document_index])
    steps = [text[:s] for text in texts]
    if extra and texts:
        steps.append(texts[-1][-1:])
    served = np.concatenate(steps)
    assert served[: len(stored)].tolist() == stored.tolist()
    assert (served[len(stored) :] == sample_format.pad).all()
    assert len(served) - len(stored) < s + extra
    for text, following in pairwise(texts):
        assert not extra or text[-1] == following[0]


@settings(deadline=None)
@given(
    document_lengths,
    st.integers(1, 8),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 10**6), min_size=1, max_size=6),
)
def test_a_batch_is_its_samples_stacked(
    lengths: list[int], s: int, extra: bool, by_file: bool, picks: list[int]
) -> None:
    sample_format = SampleFormat(
        *(s, 7, 1000, 5),
        reset_position_ids=True,
        reset_attention_mask=True,
        inter_document_masking=by_file,
        extra_token=extra,
    )
    dataset = over(Numbers(lengths), sample_format, drop=False)
    indices = [pick % len(dataset) for pick in picks]
    alone = [dataset[index] for index in indices]
    batch = dataset.__getitems__(indices)
    assert same(batch, {key: np.stack([sample[key] for sample in alone]) for key in batch})


@settings(deadline=None)
@given(document_lengths, st.integers(1, 8), st.booleans())
def test_bounds_by_file_are_its_documents(lengths: list[int], s: int, extra: bool) -> None:
    source = Numbers(lengths)
    sample_format = SampleFormat(s, 7, 1000, EOD, inter_document_masking=True, extra_token=extra)
    dataset = over(source, sample_format, drop=False)
    numbers = np.concatenate([np.full(lengths[d], d) for d in dataset.indices.document_index])
    order = np.argsort(dataset.indices.shuffle_index)
    for number, place in enumerate(order.tolist()):
        sample = dataset[place]
        of = numbers[number * s : number * s + s].tolist()
        changes = [i for i in range(1, len(of)) if of[i] != of[i - 1]]
        begins = [0, *changes]
        assert sample["cu_seqlens"].tolist() == begins + [s] * (s + 1 - len(begins))
        expected = [i - max(b for b in begins if b <= i) for i in range(s)]
        assert sample["position_ids"].tolist() == expected
        assert sample["max_seqlen"] == max(np.diff([*begins, s]))


def test_a_mapped_file_and_one_that_is_read_serve_the_same(tmp_path: Path) -> None:
    lengths = [40, 3, 0, 90, 1, 27]
    indexed = IndexedDataset(write_pair(tmp_path / "t", lengths))
    mapped, read = (over(source, FORM, drop=False) for source in (indexed, Numbers(lengths)))  # type: ignore[arg-type]
    every = list(range(len(mapped)))
    assert same(mapped.__getitems__(every), read.__getitems__(every))


def test_a_batch_of_a_blend_mixes_files_of_several_types() -> None:
    sources = [Numbers([50, 60], 0, np.uint16), Numbers([70, 80], 300, np.int32)]
    datasets = [over(source, FORM, 20) for source in sources]
    index, within = blend([0.3, 0.7], 20)
    blended = BlendedDataset(datasets, index, within)
    batch = blended.__getitems__(range(20))
    alone = [datasets[d][int(i)] for d, i in zip(index, within, strict=True)]
    assert same(batch, {key: np.stack([sample[key] for sample in alone]) for key in batch})
    assert all(same(blended[i], alone[i]) for i in range(20))
    assert blended.text(3).tolist() == datasets[index[3]].text(int(within[3])).tolist()
    ids = blended.ids(np.arange(20))
    expected = [datasets[d].ids(np.array([i]))[0, 1] for d, i in zip(index, within, strict=True)]
    assert ids.tolist() == [[int(d), int(n)] for d, n in zip(index, expected, strict=True)]
    assert blended.ids(np.arange(0)).shape == (0, 2)
    assert np.array_equal(blended.ids(np.arange(5, 15)), ids[5:15])
    assert np.array_equal(blended.ids(np.arange(20)[::-1]), ids[::-1])


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_a_token_outside_the_vocabulary_is_refused_by_the_file_it_is_in(dtype: type) -> None:
    sample_format = replace(FORM, vocab_size=500)
    good, bad = Numbers([200]), Numbers([600], 0, dtype)
    bad.prefix = "corpora/bad"
    datasets = [over(good, sample_format, 20), over(bad, sample_format, 20)]
    blended = BlendedDataset(datasets, *blend([0.5, 0.5], 20))
    with pytest.raises(DataError, match=r"corpora/bad: token \d+ in sequence 0 at "):
        blended.__getitems__(range(20))


def test_a_negative_token_is_outside_every_vocabulary() -> None:
    source = Numbers([40], dtype=np.int32)
    source.get = lambda i, offset=0, length=None: np.full(length, -1, np.int32)  # type: ignore[method-assign]
    with pytest.raises(DataError, match="token -1 "):
        over(source, FORM)[0]


def test_indices_outside_the_dataset_are_refused() -> None:
    dataset = over(Numbers([100]), FORM)
    with pytest.raises(IndexError):
        dataset[len(dataset)]
    assert same(dataset[-1], dataset[len(dataset) - 1])
