"""T5 samples: sentinels and spans put the text together again."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from tests.trainyard.datasets.masked.sentence_files import VOCABULARY, write_sentences
from trainyard.corpus.indexed import IndexedDataset
from trainyard.datasets.masked.config import MaskedConfig
from trainyard.datasets.masked.t5 import (
    T5Dataset,
    T5Format,
    attention_mask,
    cut_spans,
    fitting,
)
from trainyard.errors import ConfigError

BOS, EOS, PAD = 1, 2, 0
SENTINELS = tuple(range(VOCABULARY, VOCABULARY + 20))
BEGINS = np.arange(VOCABULARY) % 4 > 0
TOKENIZER = SimpleNamespace(
    bos=BOS, eos=EOS, pad=PAD, vocab_size=VOCABULARY, begins_word=BEGINS, extra_ids=SENTINELS
)


def sample_format(seq_length: int = 128, decoder_seq_length: int = 64) -> T5Format:
    return T5Format.of(TOKENIZER, MaskedConfig(), seq_length, decoder_seq_length, 1234)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    return write_sentences(tmp_path_factory.mktemp("t5") / "text_sentence", 200)


def restored(item: dict[str, np.ndarray]) -> list[int]:
    """Each sentinel of the encoder replaced by what follows it in the labels."""
    answer = item["labels"][: int(item["dec_mask"].sum()) - 1].tolist()
    spans: dict[int, list[int]] = {}
    for token in answer:
        if token in SENTINELS:
            spans[token] = []
        else:
            spans[next(reversed(spans))].append(token)
    encoder = item["text_enc"][item["enc_mask"] > 0].tolist()
    text = [t for token in encoder for t in spans.pop(token, [token])]
    assert not spans
    return text


@pytest.mark.parametrize("lengths", [(128, 64), (64, 8), (512, 128)])
def test_both_sides_give_the_text(sentences: IndexedDataset, lengths: tuple[int, int]) -> None:
    dataset = T5Dataset(sentences, range(200), None, sample_format(*lengths))
    for index in range(len(dataset)):
        item, target = dataset[index], dataset.samples.target_length(index)
        whole = dataset.samples.tokens(dataset.samples.sentences(index)).tolist()
        assert restored(item) == whole[:target]
        assert bool(item["truncated"]) == (len(whole) > target)


def test_the_decoder_gets_its_labels_one_place_later(sentences: IndexedDataset) -> None:
    dataset = T5Dataset(sentences, range(200), None, sample_format())
    for index in range(0, len(dataset), 5):
        item = dataset[index]
        filled = int(item["dec_mask"].sum())
        assert item["text_dec"][0] == BOS
        assert item["labels"][filled - 1] == EOS
        assert np.array_equal(item["text_dec"][1:filled], item["labels"][: filled - 1])
        assert (item["labels"][filled:] == -1).all()
        assert np.array_equal(item["loss_mask"], item["dec_mask"])
        assert (item["text_dec"][filled:] == PAD).all()
        used = [t for t in item["text_enc"].tolist() if t in SENTINELS]
        assert used == list(SENTINELS[: len(used)])
        assert item["text_enc"].shape == item["enc_mask"].shape == (128,)
        assert item["text_dec"].shape == item["labels"].shape == (64,)


def test_spans_are_a_fifteenth_of_a_hundred(sentences: IndexedDataset) -> None:
    dataset = T5Dataset(sentences, range(200), None, sample_format())
    hidden = text = 0
    for index in range(len(dataset)):
        item = dataset[index]
        used = sum(t in SENTINELS for t in item["text_enc"].tolist())
        hidden += int(item["dec_mask"].sum()) - 1 - used
        text += len(restored(item))
    assert 0.12 < hidden / text <= 0.155


def test_an_item_is_the_same_in_any_order_of_access(sentences: IndexedDataset) -> None:
    dataset = T5Dataset(sentences, range(200), None, sample_format())
    order = np.random.RandomState(1).permutation(60).tolist()
    shuffled = {index: dataset[index] for index in order}
    again = pickle.loads(pickle.dumps(T5Dataset(sentences, range(200), None, sample_format())))
    for index in range(60):
        item = again[index]
        assert all(np.array_equal(item[key], shuffled[index][key]) for key in item)
    assert dataset.ids(np.array([3])).tolist() == [[0, 3]]


def test_spans_beyond_the_sentinels_or_the_decoder_stay_in_the_text() -> None:
    spans = [[8, 9], [1], [4, 5, 6], [12]]
    assert fitting(spans, 9, 99) == [[1], [4, 5, 6], [8, 9], [12]]
    assert fitting(spans, 2, 99) == [[1], [8, 9]]
    assert fitting(spans, 9, 5) == [[1], [8, 9]]
    encoder, answer = cut_spans(np.arange(14), [[1], [8, 9]], (100, 101))
    assert encoder.tolist() == [0, 100, 2, 3, 4, 5, 6, 7, 101, 10, 11, 12, 13]
    assert answer.tolist() == [100, 1, 101, 8, 9]


def test_dense_masks_follow_from_the_rows() -> None:
    encoder, decoder = np.array([1, 1, 0]), np.array([1, 1, 1, 0])
    assert attention_mask(encoder, encoder).shape == (1, 3, 3)
    across = attention_mask(decoder, encoder)[0]
    causal = attention_mask(decoder, decoder, causal=True)[0]
    for q in range(4):
        for k in range(3):
            assert across[q, k] == (not (decoder[q] and encoder[k]))
        for k in range(4):
            assert causal[q, k] == (not (decoder[q] and decoder[k] and k <= q))
    assert attention_mask(np.stack([decoder, decoder]), decoder[None]).shape == (2, 1, 4, 4)


def test_a_tokenizer_without_sentinels_is_refused() -> None:
    without = SimpleNamespace(bos=BOS, eos=EOS, pad=PAD, vocab_size=10, extra_ids=())
    with pytest.raises(ConfigError, match="--vocab-extra-ids"):
        T5Format.of(without, MaskedConfig(), 128, 64, 1)
    with pytest.raises(ConfigError, match="no eos token, which T5 needs"):
        T5Format.of(SimpleNamespace(bos=1), MaskedConfig(), 128, 64, 1)
    with pytest.raises(ConfigError, match="--decoder-seq-length 2"):
        sample_format(128, 2)
