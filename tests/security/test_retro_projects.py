"""Retro projects of others, and what is typed at a project's prompt: refused in words, whatever is
written there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.retro_explore.calls import call, shown
from stages.retro_preprocess.commands import Command, Commands
from stages.retro_preprocess.config import RetroPreprocessConfig
from stages.retro_preprocess.run import merged_project
from tests.trainyard.retrieval.corpora import LENGTH
from tests.trainyard.retrieval.projects import MadeProject, make_project
from trainyard.config import flag
from trainyard.errors import ArtifactError, ConfigError, TrainyardError
from trainyard.retrieval.neighbors import Neighbors, block_name, write_block
from trainyard.retrieval.options import RetrievalConfig
from trainyard.retrieval.project import ProjectConfig, read_project
from trainyard.retrieval.retro import Retro
from trainyard.retrieval.retro_samples import RetroSamples
from trainyard.retrieval.shape import NeighborShape
from trainyard.training.run_samples import open_chunks

PROJECT: dict[str, Any] = {
    **{"retro_gpt_data_path": ["a"], "retro_gpt_tokenizer_type": "ByteLevelTokenizer"},
    **{"retro_gpt_train_samples": 8, "retro_gpt_eval_interval": 4, "retro_gpt_eval_iters": 1},
    **{"retro_gpt_seq_length": 16, "retro_gpt_global_batch_size": 2, "retro_index_ntrain": 9},
    **{"retro_bert_tokenizer_type": "BertWordPieceCase", "retro_bert_vocab_file": "v"},
}

# --- config.json --------------------------------------------------------------------------------

VALUES: list[Any] = [
    *(0, -1, 2**31, 2**63, 10**30, 10**400, 1.5, -(10**400), True, False, None, "", [], {}),
    *([[]], [1], [None], [{}], {"train": 1}, {"train": ["a"]}, {"evil": "x"}),
    *("1", "nan", "1e999", "nan,1,1", "inf,0,0", "-1,1,1", "0,0,0", ["nan", "a"], ["1e999", "a"]),
    *("../../../etc/passwd", "/etc/passwd", "--load", "-x", ["../../x"], {"train": "../../x"}),
    *({"train": "x/../../../y"}, {"train": ".."}, {"train": "/etc"}, {"train": "a\nb"}),
    *("http://169.254.169.254/x", "${HOME}", "$(id)", "; id", "a b", "a\nb", "a\0b", "\x1b[2J"),
    *("\u202e", "\ud800", "x" * 10_000, ["a"] * 1000),
]


def refusal(action: Callable[[], object]) -> str | None:
    """The words of an error of ours; None if there is none."""
    try:
        action()
    except TrainyardError as error:
        return str(error)
    return None


def plan(folder: Path) -> list[Command]:
    """What retro_preprocess would run."""
    given = RetroPreprocessConfig(retro_project_dir=str(folder), load="bert")
    commands = Commands(given, merged_project(given))
    return [command for step in given.steps() for command in commands.of_step(step)]


def use_all(folder: Path) -> None:
    """Read a project, and all that it leads to."""
    project = read_project(str(folder))
    for part in (project.gpt_tokenizer, project.bert_tokenizer, project.prefixes):
        part()
    if project.has_neighbors("train"):
        assert ".." not in project.neighbors("train")
    RetrievalConfig(retro_project_dir=str(folder)).located()
    for command in plan(folder):
        options = [word for word in command.argv()[2:] if word.startswith("-")]
        assert {*options} <= {flag(name) for name in command.options}


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("key", [one.name for one in fields(ProjectConfig)])
def test_a_value_of_any_kind_is_taken_or_refused_in_words(key: str, tmp_path: Path) -> None:
    """And what is taken is no option of a stage, and leads to no neighbours elsewhere."""
    said = []
    for value in VALUES:
        (tmp_path / "config.json").write_text(json.dumps(PROJECT | {key: value}))
        said.append(refusal(lambda: use_all(tmp_path)))
    refused = [words for words in said if words is not None]
    assert refused
    assert all(words.isprintable() and len(words) < 20_000 for words in refused)


TEXTS = [
    *("", "[", "NaN", "[]", "7", '"x"', "[1e999]", "[" * 100_000, "{" * 100_000, "\xff", "\0"),
    '{"retro_gpt_seed": 1' + "0" * 5000 + "}",
    '{"retro_gpt_seed": ' + "[" * 50_000 + "]" * 50_000 + "}",
    '{"retro_gpt_seed": NaN}',
    '{"' + "k" * 10_000 + '": 1}',
    json.dumps({"__class__": "os.system"}),
]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:20])
def test_a_text_that_is_no_project_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises((ArtifactError, ConfigError)) as caught:
        read_project(str(tmp_path))
    assert str(caught.value).isprintable()


OPTIONS: list[dict[str, Any]] = [
    {"retro_gpt_data_path": ["--output-dir=s3://bucket/victim"]},
    {"retro_gpt_data_path": "a --output-dir=s3://bucket/victim"},
    {"retro_gpt_data_cache_path": "--output-dir=/victim"},
    {"retro_gpt_tokenizer_type": "--output-dir=/victim"},
    {"retro_gpt_tokenizer_model": "--output-dir=s3://bucket/victim"},
    {"retro_bert_vocab_file": "-output-dir=s3://bucket/victim"},
    {"retro_index_str": "--output-dir=/victim"},
    {"retro_gpt_split": "--output-dir=/victim"},
]


@pytest.mark.parametrize("change", OPTIONS, ids=str)
def test_no_value_of_a_project_is_an_option_of_a_stage(
    change: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PROJECT))
    assert len(plan(tmp_path)) > 5
    (tmp_path / "config.json").write_text(json.dumps(PROJECT | change))
    with pytest.raises(ConfigError):
        plan(tmp_path)


FOLDERS = ["..", "../x", "query/../../x", "x/..", "../../../../etc", "a/../b"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_neighbours_lie_in_the_project(folder: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(PROJECT | {"retro_neighbor_dirs": {"train": folder}})
    )
    with pytest.raises(ConfigError, match="is not below PROJECT/query"):
        read_project(str(tmp_path))


# --- a table of neighbours, in training and at the prompt -----------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeProject:
    return make_project(tmp_path_factory.mktemp("project"))


@pytest.mark.parametrize("forged", [-2, -(2**63), 10**6, 2**32, 2**63 - 1])
def test_a_neighbour_is_a_chunk_of_the_database_or_is_refused(
    forged: int, made: MadeProject, tmp_path: Path
) -> None:
    table = made.table.copy()
    table[5, 1] = forged
    document = Path(made.project.url) / "query/train_1/neighbors.json"
    (tmp_path / document.name).write_bytes(document.read_bytes())
    write_block(tmp_path / block_name(0, len(table), len(table)), table, table.astype(np.float32))
    chunks = open_chunks(made.yard.samples, "train", LENGTH, vocab_size=257)
    shape = NeighborShape(
        seq_length=chunks.seq_length,
        chunk_length=chunks.chunk_length,
        num_neighbors=2,
        num_retrieved_chunks=2,
    )
    samples = RetroSamples(chunks._dataset, Neighbors(str(tmp_path)), made.yard.database(), shape)
    assert samples[0]["neighbor_tokens"].any()
    with pytest.raises(ArtifactError, match=rf"it has neighbour {forged}, and .* run faiss_query"):
        samples.__getitems__([0, 1])


CLAIMS: list[dict[str, Any]] = [
    {"num_neighbors": 2**40},
    {"num_neighbors": 0},
    {"num_chunks": 0},
    {"num_chunks": 2**62},
    {"num_chunks": 95},
]


@pytest.mark.parametrize("claim", CLAIMS, ids=str)
def test_a_table_that_says_it_is_larger_or_smaller_is_refused(
    claim: dict[str, Any], made: MadeProject, tmp_path: Path
) -> None:
    for path in (Path(made.project.url) / "query/train_1").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    document = json.loads((tmp_path / "neighbors.json").read_text())
    (tmp_path / "neighbors.json").write_text(json.dumps(document | claim))
    with pytest.raises(ArtifactError, match=r"run faiss_query again|not int64 of shape"):
        Neighbors(str(tmp_path)).rows([0])


@pytest.mark.parametrize("rows", [1, 95, 97])
def test_a_table_has_the_chunks_of_its_samples_or_is_refused_before_training(
    rows: int, made: MadeProject, tmp_path: Path
) -> None:
    """Also if its parts agree with each other."""
    document = Path(made.project.url) / "query/train_1/neighbors.json"
    changed = json.loads(document.read_text()) | {"num_chunks": rows}
    (tmp_path / document.name).write_text(json.dumps(changed))
    ids = np.zeros((rows, 3), np.int64)
    write_block(tmp_path / block_name(0, rows, rows), ids, ids.astype(np.float32))
    with pytest.raises(ArtifactError, match=f"of {rows} chunks, and its samples have 96"):
        Neighbors(str(tmp_path)).check(made.yard.chunks().identity())


# --- the prompt -----------------------------------------------------------------------------------

ARGUMENTS = [
    *("-1", "-2", "99999999", str(2**63 - 1), str(2**63), str(-(2**64)), "1" + "0" * 30),
    *("9" * 5000, "\uff15\uff10", "0x10", "1.5", "nan", "None", "True", "[0]", "'", "((", ""),
    *("\x1b[2J", "\u202e5", "a" * 10_000, "0; import os", "__import__('os')", "$(id)"),
]
LINES = [
    *("retro.__class__", "_open_chunks train", "open /etc", "__init__ x", "project", "\0"),
    *("(lambda: 0)()", "get_db_chunk_text\0000", "gpt_to_text -5", f"gpt_to_text {2**40}"),
    *("gpt_to_text 257", "get_db_chunk_text(" + "(" * 5000, "get_db_chunk_text " + "0 " * 5000),
    *(
        f"{name} {' '.join(before)}{argument}"
        for name, before in (
            *(("get_db_chunk_text", ()), ("get_db_chunk_bert", ()), ("gpt_to_text", ())),
            *(("get_pt_sample", ("train ",)), ("get_pt_num_samples", ())),
            *(("get_neighbor_tokens", ("0 ",)), ("print_neighbor_texts", ("0 0 ",))),
        )
        for argument in ARGUMENTS
    ),
]


def test_a_line_at_the_prompt_is_answered_or_refused_in_words(
    made: MadeProject, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = Retro.open(made.project.url)
    said = {line: refusal(lambda line=line: print(shown(call(opened, line)))) for line in LINES}
    refused = {line: words for line, words in said.items() if words is not None}
    assert len(refused) > 100
    assert [line for line, words in refused.items() if not words.isprintable()] == []
    assert capsys.readouterr().out.replace("\n", "").isprintable()


@pytest.mark.slow
def test_bytes_that_are_no_text_end_no_program(made: MadeProject) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stages.retro_explore", made.project.url],
        input=b"get_db_num_chunks\n\xff\xfe\x80\n",
        capture_output=True,
    )
    assert done.returncode == 2
    assert done.stdout.split() == [str(len(made.yard.database())).encode()]
    assert b"Traceback" not in done.stderr
