"""The section of the run card about what a Retro retrieves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.stages.test_report import HOSTILE, make, make_run, report
from trainyard.artifacts.output import Output
from trainyard.charts.markup import printable
from trainyard.errors import ArtifactError, ConfigError

TEXT = HOSTILE.replace("\x00", "").replace("\ud800", "")
TABLE = {
    "num_chunks": 96,
    "num_neighbors": 5,
    "mean_neighbors": 4.5,
    "share_fewer": 0.25,
    "share_none": 0.01,
    "samples": {"split": "train"},
}


def example(text: str) -> dict[str, Any]:
    tokens = list(text.encode())
    neighbor = {"chunk": 7, "dataset": "wiki", "document": 3, "distance": 0.5, "tokens": tokens}
    return {
        **{"sample": 4, "chunk": 1, "tokens": list(b"a chunk")},
        "neighbors": [{**neighbor, "continuation": list(b" goes on")}],
    }


def make_neighbors(root: Path, text: str = TEXT, **of_index: Any) -> str:
    """A database, an index and a table of neighbours; returns the folder of the table."""
    db, index, table = (str(root / name) for name in ("db", "index", "query"))
    tokenizer = {"tokenizer_type": "ByteLevelTokenizer", "retro_gpt_chunk_length": 64}
    make(Output.directory(db), "retro_db", {"merged/train.hdf5": "x"}, config=tokenizer)
    curve = [{"nprobe": n, "recall": r} for n, r in ((1, 0.5), (4, 0.8), (16, 0.97))]
    found = {"neighbors": 20, "sample": 500, "seed": 1, "curve": curve}
    described = {"index_str": "IVF64,SQ8", "reason": "64 lists", "nprobe": 16, "num_vectors": 9000}
    metrics = {
        "milliseconds_per_query": {"1": 0.01, "4": 0.03, "16": 0.1},
        "bytes_per_query": {"1": 1e4, "4": 4e4, "16": 16e4},
    }
    documents = {"index.json": json.dumps({**described, **of_index, "recall": found})}
    make(Output.directory(index), "faiss_add", documents, metrics=metrics)
    files = {
        "neighbors.json": json.dumps(TABLE),
        "examples.json": json.dumps({"format_version": 1, "examples": [example(text)]}),
    }
    made_of = {"retro_db": (db,), "index": (index,)}
    make(Output.directory(table), "faiss_query", files, made_of)
    return table


def test_a_card_of_the_stages_alone_shows_recall_and_neighbors_as_text(tmp_path: Path) -> None:
    page, summary = report(tmp_path, retro_neighbors=make_neighbors(tmp_path))
    head, section = page.sections[""], page.sections["What it retrieves"]
    assert "Neighbours of 96 chunks among 9 000" in head.text
    assert ["Recall@20", "0.970", "16 lists searched"] in head.rows
    assert "Index IVF64,SQ8: 64 lists." in section.text
    assert "25.0 % of the chunks have fewer than 5 neighbours, 1.0 % have none." in section.text
    assert ["4", "0.800", "0.0300 ms", "40.0 kB", ""] in section.rows
    assert ["16", "0.970", "0.100 ms", "160 kB", "default"] in section.rows
    assert "neighbour 1, distance 0.5 wiki, document 3, chunk 7" in section.text
    assert " ".join(printable(f"{TEXT} goes on").split()) in section.text  # markup stays text
    assert "sample 4, chunk 2 of it a chunk" in section.text
    assert {"retro db", "faiss add", "faiss query"} <= {
        row[0] for row in page.sections["Where it came from"].rows
    }
    assert summary["artifacts"].keys() == {"retro_neighbors"}


def test_the_section_is_on_the_card_of_a_training_too(tmp_path: Path) -> None:
    checkpoint = make_run(str(tmp_path / "yard"))["checkpoint"]
    table = make_neighbors(tmp_path)
    page, _ = report(tmp_path, checkpoint=checkpoint, retro_neighbors=table)
    assert list(page.sections)[1:3] == ["Training", "What it retrieves"]
    assert "trained on 384 tokens" in page.sections[""].text


def test_an_index_that_was_rebuilt_since_is_not_shown(tmp_path: Path) -> None:
    table = make_neighbors(tmp_path)
    index = {"index.json": json.dumps({"nprobe": 1})}
    make(Output.directory(str(tmp_path / "index")), "faiss_add", index)
    page, _ = report(tmp_path, retro_neighbors=table)
    section = page.sections["What it retrieves"]
    assert "The index was rebuilt since" in section.text
    assert "Recall@" not in page.sections[""].text
    assert "a chunk" in section.text


def test_what_is_no_table_of_neighbors_is_refused(tmp_path: Path) -> None:
    make_neighbors(tmp_path)
    with pytest.raises(ConfigError, match=r"made by faiss_add, so it is no table of neighbours"):
        report(tmp_path, retro_neighbors=str(tmp_path / "index"))
    with pytest.raises(ConfigError, match=r"--checkpoint, the folder of a run, is missing"):
        report(tmp_path)


def test_examples_of_another_program_are_refused_by_name(tmp_path: Path) -> None:
    table = make_neighbors(tmp_path)
    documents = {"neighbors.json": json.dumps(TABLE), "examples.json": '{"examples": [{"x": 1}]}'}
    made_of = {"retro_db": (str(tmp_path / "db"),), "index": (str(tmp_path / "index"),)}
    make(Output.directory(table), "faiss_query", documents, made_of)
    with pytest.raises(ArtifactError, match=r"examples.json: does not describe neighbours to show"):
        report(tmp_path, retro_neighbors=table)
