"""SentencePiece models: the ids of the library's own encode, and Megatron-LM's special tokens."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainyard.tokenizers.hostile import (
    HOSTILE,
    assert_equal,
    corpora_slice,
    every_block,
    random_texts,
    small_corpora,
    whole_corpora,
)
from tests.trainyard.tokenizers.kinds import carried
from tests.trainyard.tokenizers.models import FAST, MODELS, TRAINED, train
from trainyard.errors import ArtifactError, ConfigError
from trainyard.tokenizers.base import as_lists
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.fast.sentencepiece_model import parse_pieces, refusal_of_pieces
from trainyard.tokenizers.registry import build_tokenizer
from trainyard.tokenizers.sentencepiece import SentencePieceTokenizer

pytestmark = pytest.mark.slow

Built = dict[str, SentencePieceTokenizer]
TEXTS = (
    *("<s>", "</s>", "a<s>b</s> <unk>", "<0x41><0x0A>", "<|ctrl|>x", "\x00", "a\x00\x00b"),
    *("\u2581", "a\u2581b", " \u2581 ", "  a  b  ", "\t\n \r\n", "\x01\x1f\x7f", "\u00a0\u3000"),
    *("<|im_start|>user\nhi###aa", "##a#### aaaa", " ###", "-" * 37, "=" * 101, " " * 55),
    *("x" * 33 + " " * 33, "\ufb01\u2126\u1e9b\u0323", "\uac00\u1100\u1161", "\U0010ffff\ufffd"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for name, options in TRAINED.items():
        (path / f"{name}.model").write_bytes(train(**options))
    return path


def locate(folder: Path, shared: Path, name: str) -> str:
    return str(shared / MODELS[name] if name in MODELS else folder / f"{name}.model")


def build(url: str, kind: str = "SentencePieceTokenizer", **more: Any) -> SentencePieceTokenizer:
    config = TokenizerConfig(tokenizer_type=kind, tokenizer_model=url, **more)  # type: ignore[arg-type]
    tokenizer = build_tokenizer(config)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer


def legacy(url: str, **more: Any) -> SentencePieceTokenizer:
    return build(url, tokenizer_sentencepiece_legacy=True, **more)


@pytest.fixture(scope="module")
def built(folder: Path, shared: Path) -> Built:
    """Every model, ALBERT's with an added end of document, since it has none."""
    urls = {name: locate(folder, shared, name) for name in (*MODELS, *TRAINED)}
    return {
        name: legacy(url, tokenizer_special_tokens=("<EOD>",)) if name == "albert" else build(url)
        for name, url in urls.items()
    }


@pytest.fixture(scope="module")
def library(folder: Path, shared: Path) -> dict[str, sentencepiece.SentencePieceProcessor]:
    return {
        name: sentencepiece.SentencePieceProcessor(model_file=locate(folder, shared, name))
        for name in (*MODELS, *TRAINED)
    }


# --- equal to the library ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [*MODELS, *TRAINED])
def test_hostile_text(built: Built, library: dict[str, Any], name: str) -> None:
    texts = [*TEXTS, *HOSTILE, *every_block(step=31), *random_texts(80)]
    assert_equal(built[name], library[name].encode, texts)
    some = texts[::5]
    assert [built[name].encode(text) for text in some] == library[name].encode(some)
    assert built[name].encode_batch(some) == list(map(built[name].encode_reference, some))


@pytest.mark.parametrize("name", ["llama2", "albert", "spm"])
def test_corpora_slice(built: Built, library: dict[str, Any], shared: Path, name: str) -> None:
    assert_equal(built[name], library[name].encode, corpora_slice(shared))


RUNS = st.lists(
    st.sampled_from(["a", "b", " ", "ab", "aba", "aab", "\n", "=", "=" * 7, "\u2581", "<s>"])
    | st.characters(codec="utf-8"),
    max_size=40,
).map("".join)


@settings(max_examples=30, deadline=None)
@given(text=RUNS)
@pytest.mark.parametrize("name", FAST)
def test_runs_and_borders(built: Built, library: dict[str, Any], name: str, text: str) -> None:
    assert built[name].encode(text) == library[name].encode(text)


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(st.text(), max_size=6))
@pytest.mark.parametrize("name", ["llama2", "plain"])
def test_decoding(built: Built, name: str, texts: list[str]) -> None:
    rows = as_lists(built[name].encode_flat(texts))
    # The mark of a space is a space to the library.
    assert [built[name].decode(row) for row in rows] == [t.replace("\u2581", " ") for t in texts]


def test_two_threads_make_the_same_ids(built: Built) -> None:
    texts = random_texts(200, seed=9)
    for name in ("llama2", "spm"):
        expected = built[name].encode_batch(texts)
        assert built[name].releases_gil != built[name].engine.startswith("gigatoken")
        with ThreadPoolExecutor(2) as pool:
            assert all(rows == expected for rows in pool.map(built[name].encode_batch, [texts] * 4))


@pytest.mark.parametrize("letter", ["a", " ", "<s>"])
def test_a_line_of_half_a_megabyte(built: Built, library: dict[str, Any], letter: str) -> None:
    line = letter * ((1 << 19) // len(letter))
    assert built["llama2"].encode(line) == library["llama2"].encode(line)


def test_a_long_text_is_encoded_in_parts(
    folder: Path, library: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainyard.tokenizers.fast.seams.PART_LETTERS", 50)
    models = ("symbols", True), ("plain", False), ("removes", True), ("no prefix", True)
    for name, engine in (*models, ("no prefix", False)):
        tokenizer = build(str(folder / f"{name}.model"), use_gigatoken=engine)
        lengths = watch(tokenizer, monkeypatch)
        texts = [*(text for text in HOSTILE if len(text) < 2000), "the cat  sat aa on " * 30]
        assert_equal(tokenizer, library[name].encode, [f"x{text} a b {text}" for text in texts])
        assert max(lengths, default=0) < 1500


def test_digits_are_encoded_in_parts(
    built: Built, library: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["8" * 400, "12345 67 8" * 60, "x19,\u0661\u06f2 3" * 40, "1 2  3\n4" * 50]
    expected = [library[name].encode(texts) for name in ("llama2", "plain")]
    monkeypatch.setattr("trainyard.tokenizers.fast.seams.PART_LETTERS", 50)
    monkeypatch.setattr("trainyard.tokenizers.fast.sentencepiece_engine.is_long", lambda t: True)
    lengths = watch(built["llama2"], monkeypatch)
    monkeypatch.setattr(built["llama2"]._pieces, "_gigatoken", None)
    assert [as_lists(built[n].encode_flat(texts)) for n in ("llama2", "plain")] == expected
    assert max(lengths) < 70


def watch(tokenizer: SentencePieceTokenizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that the library is asked for, while it is."""
    lengths: list[int] = []
    by_library = tokenizer._pieces.by_library

    def watched(texts: Sequence[str]) -> list[list[int]]:
        lengths.extend(map(len, texts))
        return by_library(texts)

    monkeypatch.setattr(tokenizer._pieces, "by_library", watched)
    return lengths


def test_a_lone_surrogate_is_an_error(built: Built) -> None:
    for name in ("plain", "unigram"):
        with pytest.raises(UnicodeEncodeError):
            built[name].encode_flat(["a", "\ud800"])


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(
    "corpora", [small_corpora, pytest.param(whole_corpora, marks=pytest.mark.full)]
)
def test_the_corpora(
    built: Built,
    library: dict[str, Any],
    shared: Path,
    name: str,
    corpora: Callable[[Path], Iterator[list[str]]],
) -> None:
    for texts in corpora(shared):
        assert_equal(built[name], library[name].encode, texts)


# --- which library encodes --------------------------------------------------------------------


def test_gigatoken_encodes_where_it_can(built: Built, folder: Path) -> None:
    for name, tokenizer in built.items():
        engine = "gigatoken" if name in FAST else "sentencepiece"
        assert tokenizer.engine.startswith(f"{engine} "), name
    slow = build(str(folder / "plain.model"), use_gigatoken=False)
    assert slow.engine.startswith("sentencepiece ")
    assert slow.encode_batch(TEXTS) == built["plain"].encode_batch(TEXTS)


def test_the_log_says_why_gigatoken_is_not_used(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    build(str(folder / "unigram.model"))
    assert "no SentencePiece model of kind unigram" in caplog.text


def rescored(data: bytes, old: float, new: float) -> bytes:
    """A model in which a piece has another score (its field: number 2, four bytes)."""
    fields = [b"\x15" + struct.pack("<f", score) for score in (old, new)]
    assert data.count(fields[0]) == 1
    return data.replace(*fields)


def test_pieces_of_one_score_are_left_to_the_library(folder: Path) -> None:
    data = (folder / "plain.model").read_bytes()
    model = parse_pieces(data, "m")
    assert refusal_of_pieces(model) is None
    scores = [p.score for p in model.pieces if len(set(p.text)) > 1 and p.kind == 1]
    model = parse_pieces(rescored(data, scores[5], scores[4]), "m")
    assert refusal_of_pieces(model) == "no SentencePiece model with pieces of equal score"


# --- what the types are -----------------------------------------------------------------------


def test_gpt_and_llama_end_documents_with_their_end_of_sentence(shared: Path) -> None:
    for kind in ("Llama2Tokenizer", "GPTSentencePieceTokenizer", "SentencePieceTokenizer"):
        tokenizer = build(str(shared / MODELS["llama2"]), kind, use_gigatoken=False)
        assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos) == (32000, 2, 1)
        assert (tokenizer.pad, tokenizer.cls, tokenizer.extra_ids) == (None, None, ())
        assert tokenizer.encode("Hello world") == [15043, 3186]  # and no BOS
    spm = build(str(shared / MODELS["seqio"]))
    assert (spm.eod, spm.pad) == (1, 0)


def test_a_tokenizer_comes_back_from_the_files_it_carries(folder: Path, tmp_path: Path) -> None:
    for k, tokenizer in enumerate(
        (
            build(str(folder / "plain.model"), "Llama2Tokenizer"),
            build(str(folder / "symbols.model"), vocab_extra_ids=7),
            legacy(str(folder / "unigram.model"), tokenizer_special_tokens=("<x>", "the")),
        )
    ):
        again = carried(tokenizer, tmp_path / str(k))
        assert again.files() == tokenizer.files()
        assert again.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
        assert (again.vocab_size, again.eod) == (tokenizer.vocab_size, tokenizer.eod)


def test_pieces_that_begin_words_do(built: Built) -> None:
    llama = built["llama2"]
    begins = llama.begins_word
    assert len(begins) == llama.vocab_size
    word, rest = llama.encode("Hello")[0], llama.encode("a\n")[-1]
    assert (begins[word], begins[rest]) == (True, False)


# --- special tokens ---------------------------------------------------------------------------


def cut(text: str, tokens: list[str]) -> Iterator[str]:
    """A text cut at the first of some tokens, again and again; tokens stand by themselves."""
    while True:
        places = [(text.find(token), k) for k, token in enumerate(tokens) if token in text]
        if not places:
            yield text
            return
        place, k = min(places)
        yield from (text[:place], tokens[k])
        text = text[place + len(tokens[k]) :]


def test_the_special_tokens_of_t5(folder: Path, library: dict[str, Any]) -> None:
    processor = library["plain"]
    size = processor.get_piece_size()
    tokenizer = build(str(folder / "plain.model"), vocab_extra_ids=3)
    assert tokenizer.vocab_size == size + 4 + 1 + 3  # <CLS> to <MASK>, <PAD>, the sentinels
    assert (tokenizer.cls, tokenizer.sep, tokenizer.eod, tokenizer.mask) == (
        *range(size, size + 4),
    )
    assert (tokenizer.pad, tokenizer.bos, tokenizer.eos) == (size + 4, 1, 2)
    assert tokenizer.extra_ids == (size + 5, size + 6, size + 7)
    tokens = ["<CLS>", "<SEP>", "<EOD>", "<MASK>", "<PAD>", "<s>", "</s>"]
    tokens += [f"<extra_id_{k}>" for k in range(3)]
    ids = dict(zip(tokens, [*range(size, size + 5), 1, 2, *tokenizer.extra_ids], strict=True))
    texts = [*TEXTS, *HOSTILE, "a <extra_id_1>b<extra_id_3><MASK><MASK> <PAD", "<EOD>", "x<CLS> y"]
    for text, found in zip(texts, tokenizer.encode_batch(texts), strict=True):
        expected = []
        for part in cut(text, tokens):
            expected += [ids[part]] if part in ids else processor.encode(part)
        assert found == expected == tokenizer.encode_reference(text), f"{text[:100]!a}"
    assert tokenizer.decode(tokenizer.encode("ab<extra_id_1>ab")) == "ab <extra_id_1> ab"


def test_legacy_without_a_list_is_the_same_without_sentinels(folder: Path) -> None:
    tokenizer = legacy(str(folder / "symbols.model"))
    five = build(str(folder / "symbols.model"), vocab_extra_ids=5)
    assert tokenizer.pad == 3  # which this model has
    assert tokenizer.vocab_size + 5 == five.vocab_size
    assert tokenizer.encode("a<MASK>") == five.encode("a<MASK>")


def test_tokens_of_a_list_lose_the_space_behind(folder: Path, library: dict[str, Any]) -> None:
    processor = library["plain"]
    size, space = processor.get_piece_size(), processor.piece_to_id("\u2581")
    tokenizer = legacy(str(folder / "plain.model"), tokenizer_special_tokens=("[A]", "</s>"))
    assert (tokenizer.vocab_size, tokenizer.eod) == (size + 1, 2)
    between = processor.encode("\n")
    assert between[0] == space
    found = tokenizer.encode("[A]\n[A]\n</s>[A]\n")
    assert found == [size, *between[1:], size, *between[1:], 2, size, *between]


def test_spaces_are_kept_on_demand(shared: Path) -> None:
    url = str(shared / MODELS["spm"])
    usual, keeping = build(url), build(url, tokenizer_sentencepiece_ignore_extra_whitespaces=False)
    assert usual.encode("a  b") == usual.encode(" a b ")
    word = [usual.encode(word) for word in "ab"]
    assert keeping.encode("a b") == word[0] + word[1]
    library = sentencepiece.SentencePieceProcessor(model_file=url)
    assert keeping.encode("a  b") == (
        library.encode("a  \u262f")[:-1] + library.encode("  b\u262f")[:-1]
    )
    more = keeping.encode("a   b")
    assert len(more) > len(keeping.encode("a  b")) > len(keeping.encode("a b"))
    assert keeping.encode_batch(["a   b", "", " x"]) == [more, [], keeping.encode(" x")]


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"junk", b"\x0a\x03abc", b"\x0a\xff\xff\xff\xff\x0f"])
def test_what_is_no_model_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "m.model").write_bytes(data)
    with pytest.raises(ArtifactError, match=r"m\.model: not a SentencePiece model"):
        build(str(tmp_path / "m.model"))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_damage_is_an_artifact_error_and_no_other(data: bytes) -> None:
    with suppress(ArtifactError):
        parse_pieces(data, "m.model")


def test_options_that_do_not_go_together(folder: Path, shared: Path, tmp_path: Path) -> None:
    plain = str(folder / "plain.model")
    with pytest.raises(ConfigError, match="--tokenizer-sentencepiece-legacy"):
        build(plain, tokenizer_special_tokens=("<x>",))
    with pytest.raises(ConfigError, match="one of them is empty"):
        legacy(plain, tokenizer_special_tokens=("",))
    with pytest.raises(ConfigError, match="--vocab-size 7"):
        build(plain, vocab_size=7)
    endless = build(str(shared / MODELS["albert"]), "GPTSentencePieceTokenizer")
    assert endless.encode("some text")
    with pytest.raises(ConfigError, match="no end-of-sentence piece"):
        _ = endless.eod  # only who ends documents needs it
    with pytest.raises(ConfigError, match="add <EOD> to --tokenizer-special-tokens"):
        _ = legacy(str(shared / MODELS["albert"]), tokenizer_special_tokens=("<x>",)).eod
    with pytest.raises(ArtifactError, match="--tokenizer-model: no SentencePiece model at"):
        build(str(tmp_path / "none.model"))
