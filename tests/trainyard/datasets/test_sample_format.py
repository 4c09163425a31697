"""What samples hold under each option, against a slow reading of Megatron-LM's rules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainyard.datasets.config import DataConfig
from trainyard.datasets.sample_format import (
    NO_PAD,
    SampleFormat,
    build_sample,
    build_samples,
    pad_id,
    positions_in_documents,
    sample_format,
)

EOD = 9
PLAIN = SampleFormat(4, 1, 10, EOD)

forms = st.builds(
    SampleFormat,
    seq_length=st.integers(1, 8),
    seed=st.just(1),
    vocab_size=st.just(10),
    eod=st.just(EOD),
    pad=st.sampled_from([NO_PAD, 0, 7, EOD, 70000]),
    reset_position_ids=st.booleans(),
    eod_mask_loss=st.booleans(),
    reset_attention_mask=st.booleans(),
    create_attention_mask=st.booleans(),
    extra_token=st.booleans(),
)


def slow(text: list[int], sample_format: SampleFormat) -> dict[str, Any]:
    """One token at a time."""
    s = sample_format.seq_length
    tokens = text[:s]
    labels = text[1:] if sample_format.extra_token else [*text[1:], sample_format.pad]
    loss, places, begins, place = [], [], [0], 0
    for i, (token, label) in enumerate(zip(tokens, labels, strict=True)):
        counts = label != sample_format.pad and not (sample_format.eod_mask_loss and token == EOD)
        loss.append(float(counts))
        places.append(place if sample_format.reset_position_ids else i)
        place += 1
        if token == EOD:
            place = 0
            if i + 1 < s:
                begins.append(i + 1)
    sample: dict[str, Any] = {
        "tokens": [0 if t == sample_format.pad else t for t in tokens],
        "labels": [0 if t == sample_format.pad else t for t in labels],
        "loss_mask": loss,
        "position_ids": places,
    }
    if sample_format.reset_attention_mask:
        sample["cu_seqlens"] = begins + [s] * (s + 1 - len(begins))
        ends = [*begins[1:], s]
        sample["max_seqlen"] = max(e - b for b, e in zip(begins, ends, strict=True))
    if sample_format.create_attention_mask:
        cut = begins if sample_format.reset_attention_mask else [0]
        of = [sum(b <= i for b in cut) for i in range(s)]
        sample["attention_mask"] = [[[j > i or of[i] != of[j] for j in range(s)] for i in range(s)]]
    return sample


@given(forms, st.data())
def test_samples_equal_a_slow_walk(sample_format: SampleFormat, data: st.DataObject) -> None:
    length = sample_format.text_length
    rows = data.draw(
        st.lists(
            st.lists(st.integers(0, 9), min_size=length, max_size=length), min_size=1, max_size=3
        )
    )
    dtype = data.draw(st.sampled_from([np.uint8, np.int8, np.uint16, np.int32, np.int64]))
    stacked = build_samples(np.array(rows, dtype), sample_format)
    for number, row in enumerate(rows):
        sample = {key: values[number].tolist() for key, values in stacked.items()}
        assert sample == slow(row, sample_format)


def test_types_and_shapes() -> None:
    sample_format = replace(PLAIN, reset_attention_mask=True, create_attention_mask=True)
    sample = build_sample(np.arange(5, dtype=np.uint16), sample_format)
    assert {key: (v.dtype.name, v.shape) for key, v in sample.items()} == {
        "tokens": ("int64", (4,)),
        "labels": ("int64", (4,)),
        "loss_mask": ("float32", (4,)),
        "position_ids": ("int64", (4,)),
        "cu_seqlens": ("int32", (5,)),
        "max_seqlen": ("int32", ()),
        "attention_mask": ("bool", (1, 4, 4)),
    }


def test_no_sample_carries_a_dense_mask_unless_asked() -> None:
    sample_format = replace(PLAIN, reset_attention_mask=True, reset_position_ids=True)
    sample = build_sample(np.arange(5), sample_format)
    assert max(values.size for values in sample.values()) == 5


def test_what_all_samples_share_cannot_be_written_to() -> None:
    sample = build_sample(np.arange(5), PLAIN)
    for key in ("loss_mask", "position_ids"):
        with pytest.raises(ValueError, match="read-only"):
            sample[key][0] = 3
    sample["tokens"][0] = 8
    assert sample["labels"].tolist() == [1, 2, 3, 4]


def test_positions_begin_again_behind_an_end_of_document() -> None:
    assert positions_in_documents(np.array([EOD, 1, 2, EOD, EOD, 3]), EOD).tolist() == [
        *(0, 0, 1, 2, 0, 0)
    ]


# --- padding ----------------------------------------------------------------------------------


@dataclass
class Specials:
    vocab_size: int = 10
    eod: int = EOD
    pad: int | None = None
    bos: int | None = None


def test_a_pad_that_is_another_special_id_is_not_taken_for_padding() -> None:
    assert pad_id(None, {EOD}) == NO_PAD
    assert pad_id(7, {EOD}) == 7
    assert pad_id(EOD, {EOD}) == NO_PAD
    assert pad_id(EOD, {EOD}, allow_ambiguous=True) == EOD


@pytest.mark.parametrize("special", [Specials(pad=EOD), Specials(pad=3, bos=3)])
def test_ends_of_document_stay_in_the_loss_when_they_are_also_the_pad(special: Specials) -> None:
    text = np.array([3, EOD, 3, EOD, 1])
    data = DataConfig(data_path=("x",))
    built = sample_format(data, special, 4, 1)
    assert build_sample(text, built)["loss_mask"].tolist() == [1.0] * 4
    asked = DataConfig(data_path=("x",), allow_ambiguous_pad_tokens=True)
    assert not build_sample(text, sample_format(asked, special, 4, 1))["loss_mask"].all()


def test_every_option_reaches_the_format() -> None:
    data = DataConfig(
        data_path=("x",),
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
        dataloader_inter_document_masking=True,
        create_attention_mask_in_dataloader=True,
    )
    built = sample_format(data, Specials(pad=3), 4, 5)
    assert built == SampleFormat(4, 5, 10, EOD, 3, True, True, True, True, True)
