"""TikTokenizer: the ids of tiktoken, set up as Megatron-LM sets it up."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiktoken
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
from trainyard.errors import ArtifactError, ConfigError, DataError
from trainyard.tokenizers.base import as_lists
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer
from trainyard.tokenizers.tiktoken import TikTokenizer, parse_json, parse_lines

pytestmark = pytest.mark.slow

V1 = r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
V2 = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"v1": V1, "v2": V2}
Built = dict[str, TikTokenizer]
Expect = Callable[[list[str]], list[list[int]]]
NAMED = ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"]
TEXTS = (
    *("<s>a</s> <SPECIAL_77>x", " <unk><mask>", "<SPECIAL_1>", "<SPECIAL_999>", "<SPECIAL_1000>"),
    *(
        "don't DON'T camelCase HTTPServer x1y22",
        "a/b//\n/\n\n",
        " \n \n",
        "1234567",
        "\u01c5\u02b0",
    ),
)


def read_ranks(path: Path) -> list[bytes]:
    return parse_lines(path.read_bytes())


def encoding(ranks: Sequence[bytes], pattern: str, named: Sequence[str] = NAMED, count: int = 1000):
    special = [*named, *(f"<SPECIAL_{i}>" for i in range(len(named), count))]
    return tiktoken.Encoding(
        name="reference",
        pat_str=PATTERNS[pattern],
        mergeable_ranks={token: i + count for i, token in enumerate(ranks)},
        special_tokens={token: i for i, token in enumerate(special)},
    )


def build(url: Path, **more: Any) -> TikTokenizer:
    config = TokenizerConfig(tokenizer_type="TikTokenizer", tokenizer_model=str(url), **more)
    tokenizer = build_tokenizer(config)
    assert isinstance(tokenizer, TikTokenizer)
    return tokenizer


@pytest.fixture(scope="module")
def gpt2(shared: Path) -> Path:
    return shared / "data/vocab/gpt2/gpt2.tiktoken"


@pytest.fixture(scope="module")
def built(gpt2: Path) -> Built:
    return {name: build(gpt2, tiktoken_pattern=name) for name in PATTERNS}


@pytest.fixture(scope="module")
def reference(gpt2: Path) -> dict[str, Expect]:
    return {name: expecting(encoding(read_ranks(gpt2), name)) for name in PATTERNS}


def expecting(library: tiktoken.Encoding) -> Expect:
    return lambda texts: [library.encode(text, allowed_special="all") for text in texts]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Megatron-LM's JSON: the bytes, and some tokens of more."""
    more = [b"ab", b"abab", b" a", b"\xe4\xbd", b"\xe4\xbd\xa0", b"  ", b"00"]
    tokens = [*(bytes([i]) for i in range(256)), *more]
    path = tmp_path_factory.mktemp("tiktoken") / "vocab.json"
    path.write_text(json.dumps([entry(rank, token) for rank, token in enumerate(tokens)]))
    return path


def entry(rank: int, token: bytes) -> dict[str, Any]:
    text = token.decode(errors="replace")
    return {"rank": rank, "token_bytes": b64encode(token).decode(), "token_str": text}


# --- equal to the library ---------------------------------------------------------------------


@pytest.mark.parametrize("name", PATTERNS)
def test_hostile_text(built: Built, reference: dict[str, Any], name: str) -> None:
    texts = [*TEXTS, *HOSTILE, *every_block(step=61), *random_texts(60)]
    assert_equal(built[name], reference[name], texts)
    some = texts[::5]
    assert [built[name].encode(text) for text in some] == reference[name](some)
    assert built[name].encode_batch(some) == list(map(built[name].encode_reference, some))


@pytest.mark.parametrize("name", PATTERNS)
def test_corpora_slice(built: Built, reference: dict[str, Any], shared: Path, name: str) -> None:
    assert_equal(built[name], reference[name], corpora_slice(shared))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize(
    "corpora", [small_corpora, pytest.param(whole_corpora, marks=pytest.mark.full)]
)
def test_the_corpora(
    built: Built,
    reference: dict[str, Any],
    shared: Path,
    name: str,
    corpora: Callable[[Path], Iterator[list[str]]],
) -> None:
    for texts in corpora(shared):
        assert_equal(built[name], reference[name], texts)


@settings(max_examples=30, deadline=None)
@given(texts=st.lists(st.text() | st.sampled_from(TEXTS), max_size=8))
@pytest.mark.parametrize("name", PATTERNS)
def test_decoding(built: Built, name: str, texts: list[str]) -> None:
    rows = as_lists(built[name].encode_flat(texts))
    assert [built[name].decode(row) for row in rows] == texts


def test_gigatoken_encodes_where_it_can(built: Built, gpt2: Path) -> None:
    assert built["v2"].engine.startswith("gigatoken ")
    assert built["v1"].engine.startswith("tiktoken ")
    assert build(gpt2, use_gigatoken=False).engine.startswith("tiktoken ")
    mixed = ("<unk>", "<s>", "</s>", "<s><s>")  # which of the last two comes first?
    assert build(gpt2, tokenizer_special_tokens=mixed).engine.startswith("tiktoken ")


def test_a_text_that_is_too_much_for_the_library(built: Built) -> None:
    spaces = " " * (1 << 20)
    assert built["v2"].decode(built["v2"].encode(spaces)) == spaces
    with pytest.raises(DataError, match="cannot encode a text of 1048576 characters"):
        built["v1"].encode_flat(["a", spaces])


# --- vocabularies -----------------------------------------------------------------------------


def test_special_tokens_come_first(gpt2: Path, built: Built) -> None:
    tokenizer = built["v2"]
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (51256, 2, 4)
    assert (tokenizer.unk, tokenizer.bos, tokenizer.eos) == (0, 1, 2)
    assert (tokenizer.mask, tokenizer.cls, tokenizer.sep) == (3, 5, 6)
    assert tokenizer.encode("<s>!<SPECIAL_999>") == [1, 1000, 999]
    named = ("</s>", "<s>", "<unk>", "[INST]")
    other = build(gpt2, tokenizer_special_tokens=named, tiktoken_num_special_tokens=5)
    assert (other.eod, other.pad, other.unk, other.vocab_size) == (0, None, 2, 50261)
    assert other.encode("[INST]!<SPECIAL_4>") == [3, 5, 4]
    expect = encoding(read_ranks(gpt2), "v2", named, 5)
    texts = [*TEXTS, *HOSTILE, "[INST]"]
    assert_equal(other, expecting(expect), texts)


def test_the_json_of_megatron(tiny: Path) -> None:
    tokenizer = build(tiny, tiktoken_num_special_tokens=10)
    assert tokenizer.vocab_size == 10 + 263
    assert tokenizer.encode("ababab \u4f60") == [267, 266, 42, 270]
    expect = encoding(parse_json(tiny.read_bytes()), "v2", count=10)
    texts = [*TEXTS, *HOSTILE]
    assert_equal(tokenizer, expecting(expect), texts)


def test_a_vocabulary_is_cut_to_its_size(tiny: Path) -> None:
    tokenizer = build(tiny, tiktoken_num_special_tokens=10, vocab_size=10 + 257)
    assert tokenizer.vocab_size == 267
    assert tokenizer.encode("abab") == [266, 266]  # no token for all of it
    for size in (265, 274):
        with pytest.raises(ConfigError, match=f"--vocab-size must be 266 to 273 .*, got {size}"):
            build(tiny, tiktoken_num_special_tokens=10, vocab_size=size)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_round_trip_of_files(tiny: Path, gpt2: Path, tmp_path: Path, pattern: str) -> None:
    for k, (path, size) in enumerate([(tiny, 300), (gpt2, 5000)]):
        tokenizer = build(
            path,
            tiktoken_pattern=pattern,
            tiktoken_num_special_tokens=40,
            vocab_size=size,
            tokenizer_special_tokens=("<unk>", "<s>", "</s>", "<x>"),
        )
        again = carried(tokenizer, tmp_path / str(k))
        assert again.files() == tokenizer.files()
        assert again.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
        assert (again.vocab_size, again.eod) == (size, 2)


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it has no tokens"),
        (b"IQ== 0\nIg==\n", "line 2 is not a token in base64 and its rank"),
        (b"IQ== 0\nI!!= 1\n", "line 2: not a token in base64"),
        (b"IQ== 0\nIg== 2\n", "but 1 is missing"),
        (b"IQ== 0\nIQ== 1\n", "a token comes twice"),
        (b"[{]", "Expecting"),
        (b'["a"]', "entry 0 is not an object whose rank is 0"),
        (b'[{"rank": 1}]', "entry 0 is not an object whose rank is 0"),
        (b'[{"rank": 0, "token_bytes": ""}]', "entry 0: an empty token"),
        (b'[{"rank": 0}]', "entry 0: not a token in base64"),
        (b"\xff\xfe", "line 1 is not"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_an_invalid_vocabulary_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "v").write_bytes(data)
    with pytest.raises(ArtifactError, match=message):
        build(tmp_path / "v")


def test_every_byte_must_have_a_token(tiny: Path, tmp_path: Path) -> None:
    entries = json.loads(tiny.read_text())
    entries[7]["token_bytes"] = b64encode(b"zzz").decode()
    (tmp_path / "v").write_text(json.dumps(entries))
    with pytest.raises(ArtifactError, match="first 263 tokens must include every byte"):
        build(tmp_path / "v", tiktoken_num_special_tokens=10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tiktoken_num_special_tokens": 5}, "--tiktoken-num-special-tokens must be at least 7"),
        ({"tokenizer_special_tokens": ("<s>", "<unk>", "a")}, "must include <unk>, <s>, </s>"),
        (
            {"tokenizer_special_tokens": ("<s>", "<unk>", "</s>", "<s>")},
            "must be distinct",
        ),
        (
            {"tokenizer_special_tokens": ("<s>", "<unk>", "</s>", "<SPECIAL_9>")},
            "must be distinct",
        ),
        ({"tokenizer_special_tokens": ("<s>", "<unk>", "</s>", "")}, "not empty"),
    ],
)
def test_invalid_special_tokens_are_refused(
    tiny: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(tiny, **({"tiktoken_num_special_tokens": 20} | options))
