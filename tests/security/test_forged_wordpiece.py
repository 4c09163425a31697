"""Forged vocab.txt of BERT: refused in words, or read with ids that the vocabulary has."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainyard.errors import TrainyardError
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer
from trainyard.tokenizers.wordpiece import WordPieceTokenizer

SOUND = b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n##b\n"
TEXT = "a b ab \0 \u4f60 [MASK] \u202e " + "b" * 100_000

REFUSED = {
    "empty": b"",
    "no special token": b"a\nb\n",
    "no [UNK]": SOUND.replace(b"[UNK]\n", b""),
    "no [MASK]": SOUND.replace(b"[MASK]\n", b""),
    "a mark before the first": b"\xef\xbb\xbf" + SOUND,
    "no UTF-8": SOUND + b"\xff\xfe\n",
    "half a character": SOUND + b"\xed\xa0\x80\n",
    "any bytes": bytes(range(256)) * 100,
    "a page": b"<html>\n" * 1000,
}
TAKEN = {
    "twice": SOUND + b"a\n[UNK]\n",
    "NUL": SOUND + b"\0\n",
    "no last newline": SOUND.rstrip(),
    "of Windows": SOUND.replace(b"\n", b"\r\n"),
    "empty lines": SOUND + b"\n\nz\n",
    "one long line": SOUND + b"x" * (1 << 20) + b"\n",
    "a long piece": SOUND + b"##" + b"b" * 100_000 + b"\n",
    "escapes": SOUND + b"\x1b[2J\n" + "\u202e\na\u2028c\n".encode() + b"q\x0bw\n",
    "another order": b"[MASK]\n[SEP]\n[CLS]\n[UNK]\n[PAD]\na\n",
    "no letters in a piece": SOUND + b"##\n",
    "blanks": SOUND + b" \na\tb\n",
    "many": SOUND + b"".join(b"w%d\n" % i for i in range(30_000)),
}


def built(data: bytes, folder: Path) -> WordPieceTokenizer:
    (folder / "vocab.txt").write_bytes(data)
    config = TokenizerConfig(
        tokenizer_type="BertWordPieceLowerCase", vocab_file=str(folder / "vocab.txt")
    )
    tokenizer = build_tokenizer(config)
    assert isinstance(tokenizer, WordPieceTokenizer)
    return tokenizer


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_is_no_vocabulary_is_refused(case: str, tmp_path: Path) -> None:
    with pytest.raises(TrainyardError, match=r"--vocab-file .*vocab\.txt") as caught:
        built(REFUSED[case], tmp_path)
    assert str(caught.value).isprintable()


@pytest.mark.few_cases(3)
@pytest.mark.timeout(20)
@pytest.mark.parametrize("case", TAKEN)
def test_a_strange_vocabulary_gives_ids_that_it_has(case: str, tmp_path: Path) -> None:
    tokenizer = built(TAKEN[case], tmp_path)
    ids = tokenizer.encode(TEXT)
    assert ids
    assert all(0 <= one < tokenizer.vocab_size for one in ids)
    assert isinstance(tokenizer.decode(ids), str)
