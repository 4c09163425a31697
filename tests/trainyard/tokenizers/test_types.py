"""What each type promises beside its ids: special tokens, sizes, to come back from its files."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tokenizers import Tokenizer as Library

from tests.trainyard.tokenizers.hostile import HOSTILE
from tests.trainyard.tokenizers.kinds import build, carried, options
from trainyard.config import ROLE, digest_relevant, from_dict, leaves
from trainyard.errors import ArtifactError, ConfigError, DataError
from trainyard.tokenizers import hf_tokenizers as library_module
from trainyard.tokenizers import registry
from trainyard.tokenizers import wordpiece as wordpiece_module
from trainyard.tokenizers.base import Tokenizer, as_lists, description
from trainyard.tokenizers.carried import CARRIED_AS, DESCRIPTION
from trainyard.tokenizers.config import NEEDS, TokenizerConfig
from trainyard.tokenizers.registry import TOKENIZERS, build_tokenizer, load_tokenizer
from trainyard.tokenizers.wordpiece import KEPT_LETTERS, LONG_ROW, WordPieceTokenizer

VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##aff", "##able", "a", "!", "\u4f60"]


def wordpiece(
    folder: Path, kind: Any = "BertWordPieceLowerCase", **more: Any
) -> WordPieceTokenizer:
    (folder / "vocab.txt").write_text("\n".join(more.pop("vocab", VOCAB)) + "\n")
    config = TokenizerConfig(tokenizer_type=kind, vocab_file=str(folder / "vocab.txt"), **more)
    built = build_tokenizer(config)
    assert isinstance(built, WordPieceTokenizer)
    return built


@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_a_long_unknown_word(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words far over a hundred letters lose their middle; the library makes the same ids of the
    whole words, in any surroundings."""
    monkeypatch.setattr(wordpiece_module, "is_long", lambda text: True)
    tokenizer = wordpiece(tmp_path, kind)
    beside = [("a ", " a"), ("a!", "!a"), ("\u4f60", "\u4f60"), ("[SEP]", "\u0301 unaffable")]
    rows = ["7" * 4400, "un" * 2200, "\u00c9\u00e9" * 2200, "\U0001f600" * 4400, "aB3\u0142" * 1100]
    for row in rows:
        assert len(LONG_ROW.sub(lambda row: row[1] + row[2], row)) == 2 * KEPT_LETTERS
        text = "".join(before + row + behind for before, behind in beside)
        expected = tokenizer.library.encode(text, add_special_tokens=False).ids
        assert list(tokenizer.reference_array(text)) == expected, row[:4]
    assert list(tokenizer.reference_array(rows[0])) == [tokenizer.unk]


def simple(kind: Any, **more: Any) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(tokenizer_type=kind, **more))


# --- WordPiece --------------------------------------------------------------------------------


def test_wordpiece_knows_berts_special_tokens(tmp_path: Path) -> None:
    bert = wordpiece(tmp_path)
    assert (bert.vocab_size, bert.eod, bert.pad) == (11, 3, 0)
    assert (bert.cls, bert.sep, bert.mask, bert.unk) == (2, 3, 4, 1)
    assert (bert.bos, bert.eos, bert.extra_ids) == (2, 3, ())
    assert bert.encode("UNAFFABLE\u4f60a! b [MASK]") == [5, 6, 7, 10, 8, 9, 1, 4]
    assert bert.encode("un" * 51) == [1]  # words of more than 100 characters are unknown
    assert bert.decode([5, 6, 7, 9]) == "unaffable!"
    assert bert.encode("") == []


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            "BertWordPieceLowerCase",
            [[2, 5, 6, 7, 10, 8, 9, 1, 4, 3], [2, 8, 3], [2, 3], [2, 3], [2, 8, 3, 8, 3]],
        ),
        (
            "BertWordPieceCase",
            [[2, 1, 10, 8, 9, 1, 4, 3], [2, 8, 3], [2, 3], [2, 3], [2, 8, 3, 8, 3]],
        ),
    ],
)
def test_wordpiece_with_special_tokens_has_the_ids_of_megatron_core(
    tmp_path: Path, kind: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What megatron-core 0.16.1 made of this vocabulary with include_special_tokens, the default of
    its main: MegatronHFTokenizer.text_to_ids, with transformers 5.23."""
    texts = ["UNAFFABLE\u4f60a! b [MASK]", "a", "", "  ", "a[SEP]a"]
    bert = wordpiece(tmp_path, kind, tokenizer_hf_include_special_tokens=True)
    assert [bert.encode(text) for text in texts] == bert.encode_batch(texts) == expected
    assert as_lists(bert.encode_flat(texts)) == expected
    assert [bert.reference_array(text).tolist() for text in texts] == expected
    without = [ids[1:-1] for ids in expected]
    assert wordpiece(tmp_path, kind).encode_batch(texts) == without
    monkeypatch.setattr(wordpiece_module, "is_long", lambda text: True)
    monkeypatch.setattr(library_module, "is_long", lambda text: True)
    assert as_lists(bert.encode_flat(texts)) == expected


def test_special_tokens_cannot_be_both_put_and_left_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exclude each other; give one of them"):
        wordpiece(
            tmp_path,
            tokenizer_hf_include_special_tokens=True,
            tokenizer_hf_no_include_special_tokens=True,
        )


def test_extra_ids_come_after_the_vocabulary(tmp_path: Path) -> None:
    cased = wordpiece(tmp_path, "BertWordPieceCase")
    assert (cased.vocab_size, cased.extra_ids) == (111, tuple(range(11, 111)))
    assert cased.encode("un<extra_id_7>Un") == [5, 18, 1]
    assert wordpiece(tmp_path, "BertWordPieceCase", vocab_extra_ids=2).extra_ids == (11, 12)
    assert wordpiece(tmp_path, vocab_extra_ids=3).vocab_size == 14


def test_a_vocabulary_that_is_none_of_bert_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no \[CLS\], \[MASK\]"):
        wordpiece(tmp_path, vocab=["[PAD]", "[UNK]", "[SEP]"])
    (tmp_path / "bytes.txt").write_bytes(b"[PAD]\n\xff\n")
    with pytest.raises(ArtifactError, match="byte 6 is not UTF-8"):
        simple("BertWordPieceCase", vocab_file=str(tmp_path / "bytes.txt"))
    with pytest.raises(ArtifactError, match=r"no vocab\.txt at"):
        simple("BertWordPieceCase", vocab_file=str(tmp_path / "none.txt"))


def test_bert_of_the_shared_vocabularies(shared: Path) -> None:
    sizes = {"bert-uncased": 30522, "bert-cased": 28996 + 100, "bert-chinese": 21128}
    for kind, size in sizes.items():
        bert = build(shared, kind)
        assert bert.vocab_size == size
        assert bert.decode([bert.eod]) == "[SEP]"


# --- bytes and numbers ------------------------------------------------------------------------


def test_bytes_are_ids() -> None:
    plain = simple("ByteLevelTokenizer")
    assert (plain.vocab_size, plain.eod, plain.pad) == (512, 0, 1)
    assert plain.encode("Hello \u00e9\x00 ") == [72, 101, 108, 108, 111, 32, 195, 169, 0, 32]
    assert plain.decode([72, 255, 300, 105, 32]) == "Hi "
    more = simple("ByteLevelTokenizer", vocab_size=1024, tokenizer_special_tokens=("<a>", "<b>"))
    assert more.vocab_size == 1026
    assert more.decode([1025, 72, 1024]) == "<a>H<b>"
    assert more.encode("<a>") == [60, 97, 62]
    with pytest.raises(ConfigError, match=r"--vocab-size 255: .* needs at least 256"):
        simple("ByteLevelTokenizer", vocab_size=255)


def test_numbers_are_ids_however_they_are_read() -> None:
    null = simple("NullTokenizer", vocab_size=100)
    assert (null.vocab_size, null.eod, null.decode([3, 14])) == (100, 99, "3 14")
    texts = ["3 14\n99", "", " \u00a0", "007", "0" * 5000 + "9"]
    expected = [[3, 14, 99], [], [], [7], [9]]
    assert as_lists(null.encode_flat(texts)) == expected
    assert as_lists(null.encode_flat(texts[:4])) == expected[:4]
    assert null.encode_batch(texts) == expected
    assert as_lists(null.encode_flat(["", ""])) == [[], []]
    for wrong in ("100", "-1", "x", "\u0663", "1_0", "9" * 5000, "\u00b2"):
        for encode in (null.encode_flat, null.encode_batch):
            with pytest.raises(DataError, match="is not an id: NullTokenizer reads 0 to 99"):
                encode(["1", f"2 {wrong} 3"])


# --- options of HuggingFaceTokenizer ----------------------------------------------------------


def test_a_legacy_tokenizer_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    registry._warn_legacy.cache_clear()
    build_tokenizer(TokenizerConfig(tokenizer_type="ByteLevelTokenizer"))
    assert not caplog.records
    for _ in range(2):
        build_tokenizer(TokenizerConfig(tokenizer_type="ByteLevelTokenizer", legacy_tokenizer=True))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "--legacy-tokenizer is ignored" in record.message


@pytest.mark.parametrize("name", ["tiktoken_special_tokens", "special_tokens"])
def test_special_tokens_have_megatrons_other_names(name: str) -> None:
    options = {"tokenizer_type": "ByteLevelTokenizer", name: ["<a>"]}
    assert from_dict(TokenizerConfig, options).tokenizer_special_tokens == ("<a>",)


@pytest.mark.slow
def test_special_tokens_around_a_text_can_be_left_out(shared: Path) -> None:
    texts = [*HOSTILE, "<s>"]
    for fast in (True, False):
        with_them = build(shared, "llama", use_gigatoken=fast)
        without = build(
            shared, "llama", use_gigatoken=fast, tokenizer_hf_no_include_special_tokens=True
        )
        rows = without.encode_batch(texts)
        assert with_them.encode_batch(texts) == [[1, *row] for row in rows]
        assert [without.encode(text) for text in texts] == rows
        assert [without.encode_reference(text) for text in texts] == rows
        assert (
            rows[-1]
            == Library.from_file(options(shared, "llama")["tokenizer_model"])
            .encode("<s>", add_special_tokens=False)
            .ids
        )


@pytest.mark.slow
def test_special_tokens_are_added(shared: Path, tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "tokenizer_special_tokens": ("<image>", "<|endoftext|>"),
        "tokenizer_hf_no_use_fast": True,
    }
    for kind, first in (("gpt2", 50257), ("neox", 50280)):
        ours = build(shared, kind, **config)
        assert ours.engine.startswith("gigatoken")
        assert ours.vocab_size == first + 1
        assert ours.encode("a<image>")[-1] == first
        again = carried(ours, tmp_path / kind)
        assert again.files() == ours.files()
        assert again.encode("a<image>b") == ours.encode("a<image>b")
        elsewhere = Library.from_file(str(tmp_path / kind / "tokenizer.json"))
        assert elsewhere.encode("a<image>").ids == ours.encode("a<image>")


@pytest.mark.slow
def test_a_chat_template_is_carried(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    ours = build(shared, "neox", chat_template=str(tmp_path / "mine.jinja"))
    assert ours.files()["chat_template.jinja"] == b"{{ messages }}"
    assert carried(ours, tmp_path / "again").files() == ours.files()
    with pytest.raises(ArtifactError, match="--chat-template: no Jinja file at"):
        build(shared, "neox", chat_template=str(tmp_path / "none"))


@pytest.mark.slow
def test_limits_of_a_model_do_not_cut_documents(shared: Path, tmp_path: Path) -> None:
    document = json.loads(Path(options(shared, "llama")["tokenizer_model"]).read_text())
    document["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    document["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<unk>",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    for fast in (True, False):
        cut = simple("HuggingFaceTokenizer", tokenizer_model=str(tmp_path), use_gigatoken=fast)
        assert cut.encode_batch(HOSTILE) == build(shared, "llama").encode_batch(HOSTILE)


# --- all of them ------------------------------------------------------------------------------


def test_every_type_is_in_every_table() -> None:
    assert set(TOKENIZERS) == set(CARRIED_AS) == set(NEEDS)


def test_types_come_back_from_their_files(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    built = [
        wordpiece(tmp_path / "source", vocab_extra_ids=7),
        wordpiece(tmp_path / "source", "BertWordPieceCase"),
        simple("ByteLevelTokenizer", vocab_size=300, tokenizer_special_tokens=("<x>", "<y>")),
        simple("NullTokenizer", vocab_size=77),
    ]
    for number, tokenizer in enumerate(built):
        again = carried(tokenizer, tmp_path / str(number))
        assert again.files() == tokenizer.files()
        assert (again.vocab_size, again.eod, again.pad) == (
            tokenizer.vocab_size,
            tokenizer.eod,
            tokenizer.pad,
        )
        assert digest_relevant(again.config) == digest_relevant(tokenizer.config)
        assert all(str(tmp_path).encode() not in data for data in tokenizer.files().values())


def test_the_description_has_every_option_that_shapes_ids(tmp_path: Path) -> None:
    config = TokenizerConfig(
        tokenizer_type="MultimodalTokenizer",
        tokenizer_model=str(tmp_path),
        tokenizer_prompt_format="qwen2p5",
        tokenizer_special_tokens=("<image>",),
        image_tag_type="nvlm",
        force_system_message=True,
        use_gigatoken=False,
    )
    document = json.loads(description(config))
    assert document.pop("format_version") == 2
    assert document == digest_relevant(config)
    assert document["image_tag_type"] == "nvlm"
    assert "use_gigatoken" not in document


def test_a_carried_tokenizer_has_every_option_but_those_of_place_and_speed(tmp_path: Path) -> None:
    """An option with a second name is kept under its first; where files lie is never read."""
    changed: dict[str, Any] = {
        "tokenizer_type": "TikTokenizer",
        "vocab_size": 280,
        "tokenizer_special_tokens": ["<unk>", "<s>", "</s>", "<x>"],
        "tokenizer_hf_no_use_fast": True,
        "tokenizer_hf_include_special_tokens": True,
        "tokenizer_sentencepiece_legacy": True,
        "tokenizer_sentencepiece_ignore_extra_whitespaces": False,
        "tiktoken_pattern": "v1",
        "tiktoken_num_special_tokens": 5,
        "sft_tokenizer_prompt_format": "identity",
        "tokenizer_prompt_format": "qwen2p5",
        "image_tag_type": "nvlm",
        "force_system_message": True,
    }
    kept = [name for name, _, field in leaves(TokenizerConfig) if ROLE not in field.metadata]
    # The last two go with other types alone, or not with the one above.
    assert {*changed, "vocab_extra_ids", "tokenizer_hf_no_include_special_tokens"} == set(kept)
    lines = [b"%s %d" % (b64encode(bytes([i])), i) for i in range(256)]
    lines += [b"%s %d" % (b64encode(bytes([97, i])), 256 + i) for i in range(24)]
    (tmp_path / "a.tiktoken").write_bytes(b"\n".join(lines))
    second = changed.pop("tokenizer_special_tokens")
    document = changed | {
        "tiktoken_special_tokens": second,
        "tokenizer_model": str(tmp_path / "a.tiktoken"),
        "use_gigatoken": False,
    }
    tokenizer = build_tokenizer(from_dict(TokenizerConfig, document))
    (tmp_path / "again").mkdir()
    again = carried(tokenizer, tmp_path / "again")
    expected = changed | {"tokenizer_special_tokens": second, "vocab_extra_ids": 0}
    expected["tokenizer_hf_no_include_special_tokens"] = False
    assert digest_relevant(again.config) == expected
    assert again.encode("<x>ab</s>") == tokenizer.encode("<x>ab</s>") == [3, 102, 103, 2]
    assert again.config.use_gigatoken  # an option of speed: the default of the loading program
    planted = json.loads((tmp_path / "again" / DESCRIPTION).read_text())
    planted |= {"tokenizer_model": "/etc/passwd", "chat_template": "/etc/passwd"}
    (tmp_path / "again" / DESCRIPTION).write_text(json.dumps(planted))
    assert load_tokenizer(str(tmp_path / "again")).config == again.config


def test_a_description_of_version_one_is_read(tmp_path: Path) -> None:
    old = {
        "format_version": 1,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 9,
        "vocab_extra_ids": 0,
    }
    (tmp_path / DESCRIPTION).write_text(json.dumps(old))
    assert load_tokenizer(str(tmp_path)).vocab_size == 9


@pytest.mark.slow
def test_no_type_asks_the_network(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> NoReturn:
        raise AssertionError("a tokenizer asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for kind in ("gpt2", "llama", "bert-uncased"):
        assert build(shared, kind).encode("hello")
    with pytest.raises(ArtifactError, match="if it is a name on a hub, download"):
        simple("HuggingFaceTokenizer", tokenizer_model="openai-community/gpt2")


@pytest.mark.slow
def test_a_type_imports_its_own_library_only(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from trainyard.tokenizers.config import TokenizerConfig\n"
        "from trainyard.tokenizers.registry import build_tokenizer\n"
        "build_tokenizer(TokenizerConfig(tokenizer_type='NullTokenizer', vocab_size=9))\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    heavy = {"tokenizers", "gigatoken", "awkward", "sentencepiece", "tiktoken", "transformers"}
    assert not heavy & set(done.stdout.split())
