"""A project as text and tokens, under the names of Megatron-LM's tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainyard.retrieval.corpora import EOD, LENGTH
from tests.trainyard.retrieval.projects import K, MadeProject, make_project
from trainyard.errors import ConfigError
from trainyard.retrieval.retro import OpenedRetro, Retro

NUM_NEIGHBORS = 2


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeProject:
    return make_project(tmp_path_factory.mktemp("project"))


@pytest.fixture
def opened(made: MadeProject) -> Retro:
    return Retro.open(made.project.url)


def text_of(made: MadeProject, chunk: int) -> str:
    return bytes(made.yard.database().tokens(chunk).tolist()).decode()


def test_the_database_is_seen_as_tokens_and_text(made: MadeProject, opened: Retro) -> None:
    database = made.yard.database()
    assert opened.get_db_num_chunks() == len(database) == len(opened.get_db_dataset())
    assert opened.get_db_num_indexed_datasets() == 2
    assert [name for _, name in opened.get_db_indexed_dataset_infos()] == ["en", "de"]
    for chunk in (0, 7, len(database) - 1):
        text = text_of(made, chunk)
        assert opened.get_db_chunk_gpt(chunk) == list(text.encode())
        assert opened.get_db_chunk_text(chunk) == text
        assert len(opened.get_db_chunk_bert(chunk)) == database.rows(chunk)[4]
        assert opened.text_to_bert(text).tolist() == opened.get_db_chunk_bert(chunk)
    with pytest.raises(IndexError, match=r"chunk -1 of .*train\.hdf5"):
        opened.get_db_chunk_text(-1)


def test_a_continuation_is_of_the_same_document_or_empty(made: MadeProject, opened: Retro) -> None:
    database, ends = made.yard.database(), 0
    rows = database.chunks[:, :2].tolist()
    texts = [bytes(database.tokens(chunk).tolist()).decode() for chunk in range(len(rows))]
    for chunk, text in enumerate(texts):
        goes_on = chunk + 1 < len(rows) and rows[chunk] == rows[chunk + 1]
        after = texts[chunk + 1] if goes_on else ""
        assert opened.get_db_chunk_and_continuation_text(chunk) == [text, after]
        ends += not goes_on
    assert ends > 1


def test_samples_have_their_text_and_that_of_their_neighbors(
    made: MadeProject, opened: Retro
) -> None:
    chunks, database = made.yard.chunks(), made.yard.database()
    assert opened.get_pt_num_samples_and_chunks("train") == (24, 96)
    assert (opened.get_pt_num_samples("train"), opened.get_pt_num_chunks("train")) == (24, 96)
    assert len(opened.get_pt_dataset("valid")) == len(made.yard.chunks("valid"))
    for sample in (0, 23):
        tokens = chunks.token_rows(4 * sample, 4 * sample + 4).ravel()
        assert opened.get_pt_sample_gpt("train", sample) == tokens.tolist()
        assert opened.get_pt_sample_text("train", sample) == opened.gpt_to_text(tokens)
        found = opened.get_pt_sample("train", sample)
        ids = made.table[4 * sample : 4 * sample + 4, :NUM_NEIGHBORS]
        np.testing.assert_array_equal(found["text"], tokens)
        np.testing.assert_array_equal(found["neighbor_ids"], ids)
        assert found["neighbor_tokens"].shape == (4, NUM_NEIGHBORS, 2 * LENGTH)
        texts = opened.get_pt_neighbors_text("train", sample)
        for chunk, neighbor in np.ndindex(4, NUM_NEIGHBORS):
            number = int(ids[chunk, neighbor])
            expected = [EOD] * (2 * LENGTH)
            pair = ["", ""]
            if number >= 0:
                pair = opened.get_db_chunk_and_continuation_text(number)
                for at, text in zip((0, LENGTH), pair, strict=True):
                    expected[at : at + len(text)] = text.encode()
            assert texts[chunk][neighbor] == pair
            assert found["neighbor_tokens"][chunk, neighbor].tolist() == expected
            one = opened.get_neighbor_tokens(sample, chunk)
            assert one["neighbor_tokens"][neighbor].tolist() == expected
            assert one["chunk_tokens"].tolist() == tokens[chunk * LENGTH :][:LENGTH].tolist()
    assert len(database) > 0


def test_neighbors_are_printed_with_their_sources(
    made: MadeProject, opened: Retro, capsys: pytest.CaptureFixture[str]
) -> None:
    opened.print_neighbor_texts(0, 1)
    lines = capsys.readouterr().out.splitlines()
    first = int(made.table[1, 0])
    dataset, document = made.yard.database().rows(first)[:2].tolist()
    assert lines[1].startswith(f"neighbor 0: chunk {first}, document {document} of ")
    assert ["en", "de"][dataset] in lines[1]
    assert repr(text_of(made, first)) in lines[2]
    opened.print_neighbor_texts(23, 3)
    assert capsys.readouterr().out.splitlines()[1:] == ["neighbor 0: none", "neighbor 1: none"]
    assert K > NUM_NEIGHBORS


@pytest.mark.parametrize(
    ("name", "arguments", "error", "words"),
    [
        ("get_pt_sample_text", ("trian", 0), ConfigError, "split 'trian': did you mean 'train'"),
        ("get_pt_sample_text", ("train", 24), IndexError, "sample 24 of train: there are 24"),
        ("get_neighbor_tokens", (0, 4), IndexError, "chunk 4 of a sample: there are 4"),
        ("get_pt_neighbors_text", ("valid", 0), ConfigError, "names no folder for valid"),
    ],
)
def test_mistakes_are_named(
    opened: Retro, name: str, arguments: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        getattr(opened, name)(*arguments)


def test_neighbors_of_other_samples_are_refused(made: MadeProject, tmp_path: Path) -> None:
    other = make_project(tmp_path)
    table = tmp_path / "query/train_1"
    for path in table.iterdir():
        path.write_bytes((Path(made.project.url) / "query/train_1" / path.name).read_bytes())
    text = (table / "neighbors.json").read_text()
    (table / "neighbors.json").write_text(text.replace('"seq_length": 32', '"seq_length": 64'))
    with pytest.raises(ConfigError, match=r"neighbours of other samples .*seq_length 64, not 32"):
        Retro.open(other.project.url).get_pt_sample("train", 0)


def test_the_calls_of_megatrons_tools_work_on_the_project_that_was_opened(
    made: MadeProject,
) -> None:
    retro = OpenedRetro()
    with pytest.raises(ConfigError, match=r"no project is open; call retro\.init\(PROJECT\) first"):
        retro.get_db_num_chunks()
    with pytest.raises(AttributeError, match="no 'get_db_chunk_txt'; did you mean 'get_db_chunk_t"):
        _ = retro.get_db_chunk_txt
    retro.init(made.project.url)
    assert retro.get_db_num_chunks() == len(made.yard.database())
