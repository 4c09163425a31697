"""Which texts are suspect, and that looking at the ids finds all of them."""

from __future__ import annotations

import unicodedata
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainyard.tokenizers.base import flatten
from trainyard.tokenizers.fast.unicode_mismatch import Suspects, flag_tokens, unassigned


@cache
def suspects_of_bytes(nfc: bool) -> Suspects:
    """Made when a test asks, since each worker collects this file."""
    return Suspects({i: bytes([i]) for i in range(256)}, nfc=nfc)


@pytest.mark.slow
@given(texts=st.lists(st.text(max_size=20), max_size=5))
def test_no_suspect_is_overlooked(texts: list[str]) -> None:
    for suspects in map(suspects_of_bytes, (False, True)):
        rows = [list(text.encode()) for text in texts]
        found = suspects.find(texts, *flatten(rows))
        assert found == [i for i, text in enumerate(texts) if suspects.is_suspect(text)]


def test_suspects_are_changed_by_nfc_or_unassigned() -> None:
    plain, nfc = suspects_of_bytes(False), suspects_of_bytes(True)
    assert not plain.is_suspect("e\u0301 \u212b plain \u00e9 \u4f60 \U0001f600")
    assert plain.is_suspect("x" * (1 << 20) + "\u0378")
    assert nfc.is_suspect("e\u0301")
    assert nfc.is_suspect("\u212b")
    assert nfc.is_suspect("\u1100\u1161")
    assert not nfc.is_suspect("\u0e2a\u0e27\u0e31 \u00e9 \uac00 q\u0307")
    assert unassigned()[0x378]
    assert not unassigned()[0xE000]


@given(
    text=st.text(st.sampled_from("ae \n\u0301\u0316\u212b\u00e9\u1100\u1161\u11a8\uac00\U0001f600"))
)
def test_pieces_of_a_text_are_suspect_where_the_whole_is(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainyard.tokenizers.fast.unicode_mismatch.CHUNK", 2)
        assert suspects_of_bytes(True).is_suspect(text) == (
            not unicodedata.is_normalized("NFC", text)
        )


def test_tokens_are_flagged_by_the_beginnings_of_characters() -> None:
    risky = np.zeros(0x110000, np.bool_)
    risky[0x88F] = True  # e0 a2 8f
    tokens = {
        0: b"a",
        5: b"\xe0",
        2: b"\xe0\xa2",
        3: b"\xa2\x8f",
        7: b"\xe0\xa3",
        4: b"x\xe0\xa2\x8f",
    }
    assert np.flatnonzero(flag_tokens(tokens, risky)).tolist() == [2, 4, 5]
    assert flag_tokens({}, risky).tolist() == []
