"""The chunk database: its files by the documented format, its refusals, what a kill keeps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

import stages.retro_db.blocks as blocks
import stages.retro_db.run as stage
from stages.retro_db.config import RetroDbConfig
from tests.stages.directly import run_directly
from tests.trainyard.retrieval.corpora import (
    ENGLISH,
    EOD,
    GERMAN,
    LENGTH,
    arrays,
    build,
    merged,
    options,
    write_corpus,
    write_two,
    write_vocabulary,
)
from trainyard.artifacts import store
from trainyard.config import from_dict
from trainyard.corpus.indexed import IndexedDataset
from trainyard.datasets.config import parse_split
from trainyard.errors import ArtifactError, ConfigError, DataError
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer

KEYS = ["ratio", "prefix", "n_docs", "n_docs_train", "n_chunks", "n_chunks_train"]
KEYS += ["n_chunks_invalid", "n_chunks_sampled"]


def infos(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "db/indexed_dataset_infos.json").read_text())
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted((folder / "db").rglob("*"))
        if path.is_file()
    }


# --- the format -------------------------------------------------------------------------------


def reference(folder: Path, data_path: list[str]) -> tuple[list[list[int]], list[list[int]]]:
    """Valid and invalid chunks of all datasets as (dataset, document, start, end, BERT tokens), by
    the description of Megatron-LM's loop."""
    gpt = build_tokenizer(TokenizerConfig(tokenizer_type="ByteLevelTokenizer"))
    bert = build_tokenizer(
        TokenizerConfig(
            tokenizer_type="BertWordPieceLowerCase", vocab_file=write_vocabulary(folder)
        )
    )
    valid, invalid = [], []
    for dataset, prefix in enumerate(data_path):
        for document, sequences in enumerate(IndexedDataset(prefix).documents()):
            tokens = [int(token) for sequence in sequences for token in sequence]
            if tokens and tokens[-1] == EOD:
                tokens.pop()
            for start in range(0, len(tokens), LENGTH):
                end = min(start + LENGTH, len(tokens))
                length = len(bert.encode(gpt.decode(tokens[start:end])))
                row = [dataset, document, start, end, length]
                (valid if length else invalid).append(row)
    return valid, invalid


def test_chunks_are_those_of_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "JOB_TOKENS", 5)  # several jobs in a block
    data_path = write_two(tmp_path)
    metrics = build(tmp_path, data_path, retro_doc_block_size=3, workers=2)
    valid, invalid = reference(tmp_path, data_path)
    last = [6, 3]  # training documents end here
    assert merged(tmp_path, "train").tolist() == [r for r in valid if r[1] < last[r[0]]]
    assert merged(tmp_path, "valid").tolist() == [r for r in valid if r[1] >= last[r[0]]]
    found: dict[str, list[list[int]]] = {"chunks_valid": [], "chunks_invalid": []}
    for number, name in enumerate(("en", "de")):
        for path in sorted((tmp_path / "db/individual" / name).iterdir()):
            for key, rows in found.items():
                rows += [[number, *row] for row in arrays(path)[key].tolist()]
    assert found == {"chunks_valid": valid, "chunks_invalid": invalid}
    assert len(invalid) == 2
    assert metrics == {
        "datasets": 2,
        "documents": len(ENGLISH) + len(GERMAN),
        "chunks": len(valid),
        "train_chunks": len(merged(tmp_path, "train")),
        "invalid_chunks": 2,
        "sampled_chunks": 7,
    }


def test_arrays_have_the_documented_names_types_and_shapes(tmp_path: Path) -> None:
    build(tmp_path, write_two(tmp_path), retro_doc_block_size=3)
    blocks = [f"db/individual/en/{name}.hdf5" for name in ("00-03", "03-06", "06-08")]
    for name in blocks:
        with h5py.File(tmp_path / name) as file:
            kinds = {key: (values.dtype.str, values.shape[1:]) for key, values in file.items()}
        rows = ("<u4", (4,))
        wanted = {"chunks_valid": rows, "chunks_invalid": rows, "doc_offsets": ("<u8", (2,))}
        assert kinds == wanted
    for kind in ("sampled", "train", "valid"):
        with h5py.File(tmp_path / f"db/merged/{kind}.hdf5") as file:
            kinds = {key: (values.dtype.str, values.shape[1:]) for key, values in file.items()}
            assert file["n_written"][()].tolist() == [len(file["chunks"])]
        wanted = {"chunks": ("<u4", (5,)), "n_written": ("<u8", ())}
        assert kinds == wanted | ({"doc_offsets": ("<u8", (3,))} if kind == "train" else {})


def test_counts_are_those_of_the_files(tmp_path: Path) -> None:
    build(tmp_path, write_two(tmp_path), retro_doc_block_size=3)
    documents = [0, 0]
    for number, info in enumerate(infos(tmp_path)):
        assert list(info) == KEYS
        held = [arrays(path) for path in (tmp_path / "db/individual" / info["prefix"]).iterdir()]
        assert info["n_chunks"] == sum(len(block["chunks_valid"]) for block in held)
        assert info["n_chunks_invalid"] == sum(len(block["chunks_invalid"]) for block in held)
        assert info["n_docs"] == sum(len(block["doc_offsets"]) for block in held)
        counts = {
            kind: int((merged(tmp_path, kind)[:, 0] == number).sum())
            for kind in ("sampled", "train", "valid")
        }
        assert info["n_chunks_sampled"] == counts["sampled"]
        assert info["n_chunks_train"] == counts["train"]
        assert info["n_chunks"] == counts["train"] + counts["valid"]
        documents[number] = info["n_docs_train"]
    offsets = arrays(tmp_path / "db/merged/train.hdf5")["doc_offsets"]
    assert np.bincount(offsets[:, 0]).tolist() == documents
    ends = [(merged(tmp_path, "train")[:, :2] <= row).all(axis=1).sum() for row in offsets[:6, :2]]
    assert offsets[:6, 2].tolist() == ends
    assert offsets[-1, 2] == len(merged(tmp_path, "train"))


def test_documents_of_several_sequences_are_cut_as_a_whole(tmp_path: Path) -> None:
    from tests.trainyard.corpus.token_files import write_tokens

    whole = write_corpus(tmp_path / "whole", ["one train and another", "x"])
    split = write_tokens(
        tmp_path / "split", [[[*b"one train"], [*b" and another", EOD]], [[*b"x", EOD]]]
    )
    build(tmp_path, [whole, split], retro_gpt_split="1")
    rows = merged(tmp_path, "train")
    assert rows[rows[:, 0] == 0, 1:].tolist() == rows[rows[:, 0] == 1, 1:].tolist()


# --- the sample -------------------------------------------------------------------------------


def sample(tmp_path: Path, name: str, **more: Any) -> NDArray[np.int64]:
    folder = tmp_path / name
    folder.mkdir()
    build(folder, more.pop("data_path", write_two(folder)), **more)
    train, rows = merged(folder, "train").tolist(), merged(folder, "sampled").tolist()
    assert sorted(rows) == rows
    assert all(row in train for row in rows)
    return np.array(rows)


def test_the_sample_is_a_subset_of_the_training_chunks_by_weight(tmp_path: Path) -> None:
    prefixes = write_two(tmp_path)
    blend = ["1", prefixes[0], "3", prefixes[1]]
    rows = sample(tmp_path, "weighted", data_path=blend, retro_index_ntrain=7)
    assert np.bincount(rows[:, 0]).tolist() == [1, 5]  # of 1.75 and 5.25
    assert [info["ratio"] for info in infos(tmp_path / "weighted")] == [1.0, 3.0]


def test_the_sample_is_no_prefix_unless_asked_for(tmp_path: Path) -> None:
    rows = sample(tmp_path, "uniform")
    again = sample(tmp_path, "other", retro_sample_seed=5)
    first = sample(tmp_path, "prefix", retro_sample_mode="prefix")
    train = merged(tmp_path / "uniform", "train")
    heads = [train[train[:, 0] == k][: (first[:, 0] == k).sum()] for k in (0, 1)]
    assert first.tolist() == np.concatenate(heads).tolist()
    assert rows.tolist() != first.tolist()
    assert rows.tolist() != again.tolist()


def test_a_sample_larger_than_the_corpus_takes_all_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = sample(tmp_path, "all", retro_index_ntrain=1000)
    assert rows.tolist() == merged(tmp_path / "all", "train").tolist()
    assert "--retro-index-ntrain 1000: " in caplog.text
    assert "of de are to be sampled, which has only" in caplog.text


# --- what bytes depend on ---------------------------------------------------------------------


@pytest.mark.slow
def test_bytes_depend_on_neither_time_nor_workers_nor_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes = write_two(tmp_path)
    build(tmp_path, prefixes, retro_doc_block_size=3)
    first = files(tmp_path)
    time.sleep(1.1 - time.time() % 1)  # times of HDF5 are whole seconds
    monkeypatch.setattr(blocks, "JOB_TOKENS", 5)
    build(tmp_path, prefixes, retro_doc_block_size=3, workers=2)
    assert files(tmp_path) == first
    build(tmp_path, prefixes, retro_doc_block_size=100)
    changed = {name for name, data in files(tmp_path).items() if data != first.get(name)}
    assert changed == {f"db/individual/{name}.hdf5" for name in ("en/00-08", "de/00-05")}


@pytest.mark.slow
def test_bytes_are_the_same_from_processes_and_in_an_object_store(
    tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes = write_two(tmp_path)
    build(tmp_path, prefixes, retro_doc_block_size=3)
    monkeypatch.setattr(stage, "available_cores", lambda: 3)
    for prefix in prefixes:
        for ending in (".bin", ".idx"):
            store.write_bytes(s3_url + prefix + ending, Path(prefix + ending).read_bytes())
    url = store.join(s3_url, "db")
    far = [s3_url + prefix for prefix in prefixes]
    build(tmp_path, far, retro_doc_block_size=3, workers=3, output_dir=url)
    names = store.list_files(url)
    assert {f"db/{name}": store.read_bytes(store.join(url, name)) for name in names} == files(
        tmp_path
    )


def test_finished_blocks_are_kept_by_a_run_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefixes, cut = write_two(tmp_path), stage.cut_job
    done: list[str] = []

    def failing(at: str) -> Callable[[blocks.CutJob], Any]:
        def job(job: blocks.CutJob) -> Any:
            if job.block.name.endswith(at):
                raise DataError("told to fail")
            done.append(job.block.name)
            return cut(job)

        return job

    build(tmp_path, prefixes, retro_doc_block_size=3, output_dir=str(tmp_path / "whole"))
    monkeypatch.setattr(stage, "cut_job", failing("06-08.hdf5"))
    with pytest.raises(DataError, match="told to fail"):
        build(tmp_path, prefixes, retro_doc_block_size=3)
    monkeypatch.setattr(stage, "cut_job", failing("nowhere"))
    done.clear()
    damaged = tmp_path / "db/individual/en/00-03.hdf5"
    damaged.write_bytes(damaged.read_bytes()[:100])
    build(tmp_path, prefixes, retro_doc_block_size=3)
    assert [name.removeprefix("individual/") for name in done] == [
        *(f"en/{name}.hdf5" for name in ("00-03", "06-08")),
        *(f"de/{name}.hdf5" for name in ("00-03", "03-05")),
    ]
    assert "en/00-03.hdf5 has 100 bytes, and " in caplog.text
    whole = {path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*.hdf5")}
    assert len(whole) == 8
    for name in whole:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "db" / name).read_bytes()


def test_workers_are_no_more_than_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crews: list[Any] = []
    monkeypatch.setattr(stage, "available_cores", lambda: 2)
    run_jobs = stage.run_jobs

    def watched(function: Any, jobs: Any, crew: Any, environment: Any) -> Any:
        crews.append(crew)
        return run_jobs(function, jobs, crew, environment)

    monkeypatch.setattr(stage, "run_jobs", watched)
    build(tmp_path, write_two(tmp_path), workers=128)
    assert [(crew.processes, crew.threads) for crew in crews] == [(0, 2)]


def test_a_damaged_block_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = stage.write_block

    def damage(path: Path, block: Any) -> None:
        write(path, block)
        path.write_bytes(path.read_bytes()[:100])

    monkeypatch.setattr(stage, "write_block", damage)
    with pytest.raises(ArtifactError, match=r"en/00-08.hdf5: no array .chunks_valid. to read"):
        build(tmp_path, write_two(tmp_path))
    assert (tmp_path / "db/individual/en/00-08.hdf5").exists()


# --- refusals ---------------------------------------------------------------------------------


def refused(folder: Path, data_path: list[str], **more: Any) -> None:
    """Run, expecting an error, and nothing written."""
    try:
        build(folder, data_path, **more)
    finally:
        assert not (folder / "db").exists()


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_a_corpus_without_tokens_is_refused(tmp_path: Path, texts: list[str]) -> None:
    prefix = write_corpus(tmp_path / "none", texts)
    with pytest.raises(ArtifactError, match=rf"none: no token in {len(texts)} documents"):
        refused(tmp_path, [*write_two(tmp_path), prefix])


def test_a_corpus_without_words_is_refused(tmp_path: Path) -> None:
    blank = write_corpus(tmp_path / "blank", ["   ", " " * 20, "a"])
    with pytest.raises(DataError, match=r"blank: no chunk of its 2 .* \(4 chunks have none\)"):
        build(tmp_path, [*write_two(tmp_path), blank])
    assert not (tmp_path / "db/merged").exists()


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    from tests.trainyard.corpus.token_files import write_tokens

    prefix = write_tokens(tmp_path / "other", [[[*b"fine"]], [[*b"not", 5000, *b"fine"]]])
    with pytest.raises(DataError, match=r"token 5000 in document 1 at place 3 is outside the voc"):
        refused(tmp_path, [prefix], retro_gpt_split="1")


def test_a_job_checks_tokens_that_no_check_before_it_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.trainyard.corpus.token_files import write_tokens

    monkeypatch.setattr(stage, "check_tokens", lambda *_: None)
    prefix = write_tokens(tmp_path / "other", [[], [[*b"a"], [*b"not", 5000]]])
    with pytest.raises(DataError, match=r"token 5000 in document 1 at place 4 is outside the voc"):
        build(tmp_path, [prefix], retro_gpt_split="1")


def test_a_split_without_training_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'0.1,0.9' leaves none of the 8 documents of .*en for"):
        refused(tmp_path, write_two(tmp_path), retro_gpt_split="0.1,0.9")


@pytest.mark.parametrize("split", ["969,30,1", "96.9, 3, 0.1", "0.969,0.030,0.001"])
def test_a_split_may_be_fractions_percent_or_parts(split: str) -> None:
    config = from_dict(RetroDbConfig, options(Path("/tmp"), ["a"], retro_gpt_split=split))
    assert config.train_fraction() == pytest.approx(0.969)
    assert config.train_fraction() == parse_split(split)[0][1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"retro_gpt_split": "0,1"}, r"--retro-gpt-split '0,1': the first number is the part"),
        ({"retro_gpt_split": "90;10"}, r"--retro-gpt-split '90;10' must be up to three numbers"),
        ({"retro_gpt_chunk_length": 0}, "--retro-gpt-chunk-length must be at least 1"),
        ({"retro_doc_block_size": 0}, "--retro-doc-block-size must be at least 1"),
        ({"retro_index_ntrain": 0}, "--retro-index-ntrain must be at least 1"),
        ({"retro_sample_seed": -1}, "--retro-sample-seed must be at least 0"),
        ({"data_path": []}, "--data-path names no pair"),
        ({"data_path": ["1", "a", "0", "b"]}, "--data-path: the weight of b must be above 0"),
        ({"data_path": ["1", "a", "nan", "b"]}, "--data-path: the weight of b must be above 0"),
        ({"data_path": ["x/a", "x/a"]}, "--data-path names x/a twice"),
    ],
)
def test_wrong_options_are_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict(RetroDbConfig, options(tmp_path, ["a"]) | changed)


def test_megatrons_name_of_the_corpora_is_accepted(tmp_path: Path) -> None:
    given = options(tmp_path, [])
    del given["data_path"]
    config = from_dict(RetroDbConfig, {**given, "retro_gpt_data_path": ["1", "a", "2", "b"]})
    assert list(config.inputs()) == [
        *("data_0 (weight 1.0, name a)", "data_1 (weight 2.0, name b)", "tokenizer", "bert")
    ]


def test_a_vocabulary_that_is_not_berts_is_refused(tmp_path: Path) -> None:
    given = options(tmp_path, write_two(tmp_path))
    Path(given["retro_bert_vocab_file"]).write_text("a\nb\n")
    with pytest.raises(ConfigError, match="it is not a vocabulary of BERT"):
        run_directly(RetroDbConfig, stage.run, **given)
