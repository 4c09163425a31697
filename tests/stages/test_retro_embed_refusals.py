"""Embeddings computed again and compared; what retro_embed refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from stages.retro_embed.config import RetroEmbedConfig
from stages.retro_embed.inputs import check_inputs
from tests.stages.embed_runs import (
    command,
    files,
    launch,
    make_yard,
    options,
    run,
    validate,
    vectors,
)
from tests.stages.full_disk import fill_disk
from tests.trainyard.corpus.token_files import write_tokens
from tests.trainyard.embedding.encoders import make
from tests.trainyard.retrieval.corpora import build, write_corpus
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.manifest import _from_document
from trainyard.config import from_dict
from trainyard.errors import ArtifactError, ConfigError, DataError, TrainyardError
from trainyard.retrieval.vectors import write_block


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chunk database, and an encoder of its vocabulary."""
    return make_yard(tmp_path_factory.mktemp("yard"))


# --- validation ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_blocks_computed_again_are_equal(
    yard: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command(yard, out)
    before = files(out)
    launch(yard, out, retro_task_validate=0.2)
    assert "1 of 5 blocks computed again" in capsys.readouterr().out
    metrics = validate(yard, out, 0.5)
    assert metrics == {"blocks": 3, "chunks": 12, "largest_difference": 0.0}
    assert "3 of 5 blocks computed again" in capsys.readouterr().out
    assert files(out) == before


def test_a_block_that_differs_is_named(yard: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command(yard, out)
    path = out / "blocks/04-08.hdf5"
    found = vectors(out)[4:8].copy()
    found[2, 5] += 1e-3 * np.linalg.norm(found[2])
    digest = digest_bytes(path.read_bytes())
    write_block(path, found)
    manifest = (out / "manifest.json").read_text()
    document = json.loads(manifest.replace(digest, digest_bytes(path.read_bytes())))
    document["output_digest"] = _from_document(document).output_digest
    (out / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match=r"04-08.hdf5: the vector of chunk 6 differs .* by 0.001 "):
        validate(yard, out, 1.0)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"pooling": "cls"}, "--pooling 'cls': .* was made with 'mean'"),
        ({"load": "other"}, r"input load \(.*other\) is not the one that .* was made from"),
    ],
)
def test_other_embeddings_are_not_validated(
    changed: dict[str, Any], words: str, yard: Path, tmp_path: Path
) -> None:
    command(yard, tmp_path / "out")
    if "load" in changed:
        make(tmp_path / "other", seed=2)
        changed = {"load": str(tmp_path / "other")}
    with pytest.raises(ConfigError, match=words):
        validate(yard, tmp_path / "out", 1.0, **changed)


def test_nothing_to_validate_is_refused(yard: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no manifest.json, so there is no finished"):
        validate(yard, tmp_path / "out", 1.0)


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"load": None}, "one of --load .* and --embedder .* is needed, and neither was given"),
        ({"embedder": "x"}, "and both were given"),
        ({"retro_bert_vocab_file": "v"}, "belong together; add --retro-bert-tokenizer-type"),
        ({"rank": 0}, "--rank 0 needs --world-size"),
        ({"rank": 2, "world_size": 2}, "--rank 2: shares of --world-size 2 are 0 to 1"),
        ({"retro_task_validate": 1.5}, "--retro-task-validate is a share of the blocks"),
        ({"retro_task_validate": 0.5, "world_size": 2}, "leave --world-size out"),
        ({"retro_block_size": 0}, "--retro-block-size must be at least 1"),
        ({"chunks": "pretraining"}, "retro_db .* only applies with --chunks train; leave it out"),
        ({"chunks": "test"}, "chunks is 'test'"),
        ({"retro_index_str": "Flat"}, "--retro-index-str is for --chunks sampled"),
    ],
)
def test_wrong_options_are_refused(
    changed: dict[str, Any], words: str, yard: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        from_dict(RetroEmbedConfig, options(yard, tmp_path, **changed))


def refused(yard: Path, out: Path, words: str, **changed: Any) -> None:
    with pytest.raises(TrainyardError, match=words):
        run(yard, out, **changed)
    assert not (out / "blocks").exists()


def test_wrong_inputs_are_refused_before_any_work(yard: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(
        yard,
        out,
        "names de .*, en .*, but .* was cut from",
        data_path=[str(yard / "de"), str(yard / "en")],
    )
    refused(
        *(yard, out, "NullTokenizer: .*db was cut with the ByteLevelTokenizer; give the same"),
        tokenizer_type="NullTokenizer",
        vocab_size=300,
    )
    vocabulary = tmp_path / "vocab.txt"
    lines = (yard / "bert/vocab.txt").read_text().splitlines()
    vocabulary.write_text("\n".join([*lines[:-2], lines[-1], lines[-2]]) + "\n")
    given = {
        "retro_bert_tokenizer_type": "BertWordPieceLowerCase",
        "retro_bert_vocab_file": str(vocabulary),
    }
    refused(yard, out, "another vocabulary; give the encoder of", **given)
    vocabulary.write_text("\n".join(lines))  # the same tokens in another file
    run(yard, out, **given)


def test_chunks_too_few_for_the_index_are_refused_before_any_is_embedded(
    yard: Path, tmp_path: Path
) -> None:
    given = options(yard, tmp_path, chunks="sampled", retro_index_str="IVF4,Flat")
    words = r"its 4 lists need 156 .*sampled.hdf5 gives 7; .*larger --retro-index-ntrain"
    with pytest.raises(ConfigError, match=words):
        check_inputs(from_dict(RetroEmbedConfig, given))
    check_inputs(from_dict(RetroEmbedConfig, {**given, "retro_index_str": "Flat"}))


def test_embeddings_that_fill_the_disk_are_refused(
    yard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch)
    refused(yard, tmp_path / "out", r"embeddings of \d+ dimensions take .* another disk or an obj")


def test_a_damaged_database_is_refused(yard: Path, tmp_path: Path) -> None:
    shutil.copytree(yard / "db", tmp_path / "db")
    path = tmp_path / "db/merged/train.hdf5"
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    config = from_dict(
        RetroEmbedConfig, options(yard, tmp_path / "out", retro_db=str(tmp_path / "db"))
    )
    with pytest.raises(ArtifactError, match=r"merged/train.hdf5: "):
        check_inputs(config)


def test_a_database_without_chunks_is_refused(yard: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "en", ["a text of some words"])
    build(tmp_path, [str(tmp_path / "en")], retro_gpt_split="100,0,0")
    given = {"retro_db": str(tmp_path / "db"), "data_path": [str(tmp_path / "en")]}
    refused(yard, tmp_path / "out", "merged/valid.hdf5 has no chunk", chunks="valid", **given)


def test_tokens_outside_the_vocabulary_are_named(yard: Path, tmp_path: Path) -> None:
    """A database of another program says nothing of its tokenizer."""
    write_corpus(tmp_path / "en", ["abcdefgh" * 3])
    build(tmp_path, [str(tmp_path / "en")], retro_gpt_split="100,0,0")
    write_tokens(tmp_path / "en", [[[1] * 8 + [2] * 8 + [3] * 7 + [999, 0]]])
    given = {"retro_db": str(tmp_path / "db"), "data_path": [str(tmp_path / "en")]}
    with pytest.raises(DataError, match="token 999 of chunk 2 is outside the vocabulary of 512"):
        run(yard, tmp_path / "out", **given)


@pytest.mark.slow
def test_numbers_that_fp16_cannot_hold_are_named(yard: Path, tmp_path: Path) -> None:
    model = make(tmp_path / "bert")
    with torch.no_grad():
        model.encoder.layer[0].output.LayerNorm.weight.mul_(1e6)
        model.encoder.layer[0].output.LayerNorm.bias.fill_(7e4)
    model.save_pretrained(tmp_path / "bert")
    with pytest.raises(DataError, match=r"vector of chunk 0; with --fp16, .* give --bf16"):
        run(yard, tmp_path / "out", load=str(tmp_path / "bert"), fp16=True)
