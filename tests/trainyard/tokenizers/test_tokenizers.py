"""Every type gives the ids of its reference, and comes back from the files it carries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Engine
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from tests.trainyard.tokenizers.hostile import HOSTILE
from tests.trainyard.tokenizers.kinds import build, carried, huggingface
from trainyard.corpus.layout import optimal_dtype
from trainyard.errors import ArtifactError, ConfigError
from trainyard.tokenizers.base import Tokenizer
from trainyard.tokenizers.carried import DESCRIPTION
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer, load_tokenizer

TRAINING = ["The quick brown fox.\n\n  indented\ttabs", "na\u00efve \u4f60\u597d", "a" * 3000]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder as stages.train_tokenizer writes them, but tiny."""
    engine = Engine(BPE())
    engine.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<pad>"],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(TRAINING * 3, trainer)
    path = tmp_path_factory.mktemp("tokenizer")
    engine.save(str(path / "tokenizer.json"))
    end = {"__type": "AddedToken", "content": "<|endoftext|>"}
    settings = {"eos_token": end, "pad_token": "<pad>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


# --- equal to the reference -------------------------------------------------------------------


@pytest.mark.slow
def test_gpt2_is_transformers_gpt2(shared: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = build(shared, "gpt2")
    assert (ours.vocab_size, ours.eod, ours.pad) == (50257, 50256, None)
    assert carried(ours, tmp_path / "gpt2").files() == ours.files()
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "gpt2")
    lines = (shared / "data/corpora/multilingual_mix.jsonl").read_text().splitlines()[::20]
    texts = [*HOSTILE, *(json.loads(line)["text"] for line in lines)]
    assert ours.encode_batch(texts) == [reference(text).input_ids for text in texts]
    assert ours.eod in ours.encode("a<|endoftext|>b")
    assert reference.eos_token_id == ours.eod


def test_huggingface_is_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = huggingface(folder)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.encode_batch(HOSTILE) == [reference(text).input_ids for text in HOSTILE]
    assert ours.vocab_size == len(reference)
    assert (ours.eod, ours.pad) == (reference.eos_token_id, reference.pad_token_id)


def test_special_tokens_around_a_text_are_put_as_megatron_does(shared: Path) -> None:
    llama = huggingface(shared / "data/vocab/hf/llama-tokenizer.json")
    assert llama.encode("hello")[0] == 1
    assert llama.eod == 2


# --- laws -------------------------------------------------------------------------------------


def test_a_tokenizer_comes_back_from_the_files_it_carries(folder: Path, store_url: str) -> None:
    tokenizer = huggingface(folder)
    again = carried(tokenizer, store_url)
    assert again.files() == tokenizer.files()
    assert again.encode_batch(HOSTILE) == tokenizer.encode_batch(HOSTILE)
    assert (again.vocab_size, again.eod, again.pad) == (300, tokenizer.eod, tokenizer.pad)
    assert all(str(folder).encode() not in data for data in tokenizer.files().values())


@pytest.mark.slow
def test_what_is_encoded_is_decoded(folder: Path, shared: Path) -> None:
    for tokenizer in (huggingface(folder), build(shared, "gpt2")):
        if tokenizer.config.tokenizer_type == "GPT2BPETokenizer":
            assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(HOSTILE)] == [*HOSTILE]
        assert tokenizer.encode_batch(HOSTILE) == [tokenizer.encode(text) for text in HOSTILE]


def move_id(folder: Path, to: Path, old_id: int, new_id: int) -> None:
    """The tokenizer of `folder` with another number for one of its ids."""
    document = json.loads((folder / "tokenizer.json").read_text())
    vocab = document["model"]["vocab"]
    vocab[next(token for token, i in vocab.items() if i == old_id)] = new_id
    (to / "tokenizer.json").write_text(json.dumps(document))


@pytest.mark.parametrize(("new_id", "dtype"), [(9000, "uint16"), (70000, "int32")])
def test_holes_in_the_ids_count(folder: Path, tmp_path: Path, new_id: int, dtype: str) -> None:
    old_id = huggingface(folder).encode("q")[0]
    move_id(folder, tmp_path, old_id, new_id)
    tokenizer = huggingface(tmp_path)
    assert tokenizer.encode("q") == [new_id]
    assert tokenizer.vocab_size == new_id + 1
    assert optimal_dtype(tokenizer.vocab_size) == dtype


def test_holes_in_the_ids_of_gpt2_count_too(tmp_path: Path) -> None:
    vocab = {"a": 0, "b": 1, "ab": 9000, "<|endoftext|>": 2}
    tokenizer = build_gpt2_from(tmp_path, vocab, "a b\n")
    assert tokenizer.vocab_size == 9001
    assert tokenizer.encode("ab<|endoftext|>") == [9000, 2]


# --- which token ends a document --------------------------------------------------------------


def test_the_end_of_document_is_found_without_settings(folder: Path, tmp_path: Path) -> None:
    assert huggingface(folder / "tokenizer.json").eod == 0
    document = json.loads((folder / "tokenizer.json").read_text())
    document["added_tokens"] = []
    document["model"]["vocab"] = {
        ("</s>" if token == "<|endoftext|>" else token): i
        for token, i in document["model"]["vocab"].items()
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert huggingface(tmp_path).eod == 0
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<pad>"}')
    assert huggingface(tmp_path).eod == 1


def test_no_end_of_document_is_refused(folder: Path, tmp_path: Path) -> None:
    document = json.loads((folder / "tokenizer.json").read_text())
    document["added_tokens"] = []
    document["model"]["vocab"].pop("<|endoftext|>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="does not name the token that ends a document"):
        huggingface(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<gone>"}')
    with pytest.raises(ConfigError, match="eos_token '<gone>' is not in its vocabulary"):
        huggingface(tmp_path)


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v"}, "needs --merge-file"),
        ({"tokenizer_type": "GPT2BPETokenizer", "merge_file": "m"}, "needs --vocab-file"),
        ({"tokenizer_type": "HuggingFaceTokenizer"}, "needs --tokenizer-model"),
        ({"tokenizer_type": "NullTokenizer"}, "needs --vocab-size"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 0}, "--vocab-size must be positive"),
        (
            {"tokenizer_type": "NullTokenizer", "vocab_size": 9, "vocab_extra_ids": 2},
            "--vocab-extra-ids 2",
        ),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TokenizerConfig(**options)


def test_a_vocabulary_size_that_is_not_so_is_refused(folder: Path) -> None:
    huggingface(folder, vocab_size=300)
    with pytest.raises(ConfigError, match="--vocab-size 301, but HuggingFaceTokenizer has 300"):
        huggingface(folder, vocab_size=301)


def test_files_that_are_not_there_or_not_tokenizers(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="--tokenizer-model: gpt2 is neither"):
        huggingface("gpt2")
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ArtifactError, match=r"not a readable tokenizer\.json"):
        huggingface(tmp_path)
    with pytest.raises(ArtifactError, match=r"--vocab-file: no vocab\.json at"):
        build_gpt2_from(tmp_path, None, None)
    with pytest.raises(ArtifactError, match=r"--merge-file: no merges\.txt at"):
        build_gpt2_from(tmp_path, {"<|endoftext|>": 0}, None)
    with pytest.raises(ConfigError, match=r"has no <\|endoftext\|>"):
        build_gpt2_from(tmp_path, {"a": 0}, "")
    with pytest.raises(ArtifactError, match="line 2 is not two tokens"):
        build_gpt2_from(tmp_path, {"<|endoftext|>": 0}, "#version: 0.2\nabc\n")
    with pytest.raises(ArtifactError, match="do not fit the vocabulary"):
        build_gpt2_from(tmp_path, {"<|endoftext|>": 0, "a": 1}, "a b\n")


def build_gpt2_from(folder: Path, vocab: dict[str, int] | None, merges: str | None) -> Tokenizer:
    files = folder / "vocab.json", folder / "merges.txt"
    if vocab is not None:
        files[0].write_text(json.dumps(vocab))
    if merges is not None:
        files[1].write_text(merges)
    config = TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer", vocab_file=str(files[0]), merge_file=str(files[1])
    )
    return build_tokenizer(config)


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        (b'{"<|endoftext|>": 0, "\xff": 1}', b"", r"--vocab-file .*byte 22, on line 1, is not UTF"),
        (b'{"<|endoftext|>": 0, "a"', b"", "--vocab-file .*not a JSON document"),
        (b"[" * 100_000, b"", "--vocab-file .*not a JSON document"),
        (b'["<|endoftext|>"]', b"", "--vocab-file .*not a table of tokens and ids"),
        (b'{"<|endoftext|>": -1}', b"", "--vocab-file .*not a table of tokens and ids"),
        (b'{"<|endoftext|>": 4294967296}', b"", "--vocab-file .*not a table of tokens and ids"),
        (b'{"<|endoftext|>": 0}', b"#version\na \xe9\n", r"--merge-file .*byte 11, on line 2, is"),
        (b'{"<|endoftext|>": 0}', b"a b c\n", "--merge-file .*line 1 is not two tokens"),
    ],
)
def test_broken_gpt2_files(tmp_path: Path, vocab: bytes, merges: bytes, message: str) -> None:
    (tmp_path / "vocab.json").write_bytes(vocab)
    (tmp_path / "merges.txt").write_bytes(merges)
    with pytest.raises(ArtifactError, match=message):
        build_gpt2_from(tmp_path, None, None)


def test_a_newer_description_is_refused(tmp_path: Path) -> None:
    (tmp_path / DESCRIPTION).write_text('{"format_version": 99, "tokenizer_type": "Next"}')
    with pytest.raises(ArtifactError, match="use a newer trainyard"):
        load_tokenizer(str(tmp_path))
    (tmp_path / DESCRIPTION).write_text('{"format_version": 1, "tokenizer_type": "Next"}')
    with pytest.raises(ArtifactError, match="unknown tokenizer_type 'Next'"):
        load_tokenizer(str(tmp_path))
