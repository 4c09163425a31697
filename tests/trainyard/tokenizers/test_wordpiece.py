"""BERT's word pieces: counts without ids."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.trainyard.retrieval.corpora import write_vocabulary
from trainyard.tokenizers import wordpiece
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.fast.seams import PART_LETTERS
from trainyard.tokenizers.wordpiece import build_wordpiece


@pytest.mark.parametrize("around", [False, True])
def test_lengths_are_those_of_the_ids(tmp_path: Path, around: bool) -> None:
    tokenizer = build_wordpiece(
        TokenizerConfig(
            tokenizer_type="BertWordPieceLowerCase",
            vocab_file=write_vocabulary(tmp_path),
            tokenizer_hf_include_special_tokens=around,
        )
    )
    random = Random(1)
    letters = [*map(chr, range(0x180)), *"\u0301\u0307\u03a3\u2028\u3000\u4e2d\ufffd    "]
    letters += ["[SEP]", " [", "MASK]"]
    texts = ["", " \n", "a train, words"]
    texts += ["".join(random.choices(letters, k=length % 40)) for length in range(400)]
    for more in ([], ["a" * (PART_LETTERS + 1)] if around else []):
        wanted = [len(ids) for ids in tokenizer.encode_batch(texts + more)]
        assert tokenizer.lengths(texts + more).tolist() == wanted


def test_remembered_words_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wordpiece, "MAX_WORDS", 3)
    tokenizer = build_wordpiece(
        TokenizerConfig(
            tokenizer_type="BertWordPieceLowerCase", vocab_file=write_vocabulary(tmp_path)
        )
    )
    for text in ("a b", "a c d", "d a", "a b c d e"):
        assert tokenizer.lengths([text, "a"]).tolist() == [len(text.split()), 1]
