"""A Retro project under Megatron-LM's options: which stages run, with which flags, and all of them
for real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("faiss")

from flows.stage_configs import CONFIGS
from stages.retro_preprocess.commands import Command, Commands
from stages.retro_preprocess.config import RetroPreprocessConfig
from stages.retro_preprocess.run import merged_project
from stages.runtime.cli import parse_options
from tests.stages.directly import run_process, run_program
from tests.trainyard.retrieval.corpora import LENGTH, write_corpus, write_vocabulary
from tests.trainyard.retrieval.samples import SEQ_LENGTH, sentences
from trainyard.config import from_dict
from trainyard.errors import ConfigError
from trainyard.retrieval.neighbors import Neighbors
from trainyard.retrieval.project import read_project
from trainyard.retrieval.retro import Retro

BUILT = ["retro_db", "retro_embed", "faiss_train", "retro_embed", "faiss_add"]
FOUND = ["retro_embed", "faiss_query"]


def options(project: Path, **more: Any) -> dict[str, Any]:
    return {
        "retro_project_dir": str(project),
        "load": str(project / "bert"),
        "retro_gpt_data_path": ["1", "en", "1", "de"],
        "retro_gpt_split": "75,25,0",
        "retro_gpt_train_samples": 24,
        "retro_gpt_eval_interval": 6,
        "retro_gpt_eval_iters": 1,
        "retro_gpt_tokenizer_type": "ByteLevelTokenizer",
        "retro_gpt_seq_length": SEQ_LENGTH,
        "retro_gpt_global_batch_size": 4,
        "retro_gpt_chunk_length": LENGTH,
        "retro_bert_tokenizer_type": "BertWordPieceLowerCase",
        "retro_bert_vocab_file": "vocab.txt",
        "retro_bert_max_chunk_length": 48,
        "retro_index_ntrain": 50,
        "retro_query_num_neighbors_query": 40,
        "retro_query_num_neighbors_save": 4,
        **more,
    }


def words_of(given: dict[str, Any]) -> list[str]:
    """As a command line."""
    words = []
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return words


def planned(project: Path, **more: Any) -> list[Command]:
    given = {k: v for k, v in options(project, **more).items() if v is not None}
    config = from_dict(RetroPreprocessConfig, given)
    commands = Commands(config, merged_project(config))
    return [command for step in config.steps() for command in commands.of_step(step)]


# --- what runs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tasks", "stages"),
    [
        ("build", [*BUILT, *FOUND, *FOUND]),
        ("db-build", BUILT[:1]),
        ("build_db,train_index", BUILT[:3]),
        ("index-build", BUILT[1:]),
        ("add_to_index", BUILT[3:]),
        ("query,build_db", [*BUILT[:1], *FOUND, *FOUND]),
        ("query-neighbors", [*FOUND, *FOUND]),
    ],
)
def test_tasks_have_two_spellings_and_run_in_their_order(
    tmp_path: Path, tasks: str, stages: list[str]
) -> None:
    assert [one.stage for one in planned(tmp_path, retro_tasks=[tasks])] == stages


def test_options_of_one_stage_are_passed_on_to_it(tmp_path: Path) -> None:
    given = {
        "pooling": "mean-all",
        "normalize": True,
        "retro_sample_mode": "prefix",
        "target_recall": 0.9,
        "retro_min_recall": 0.8,
        "retro_exclude_evaluation": ["tests/nq", "tests/squad"],
        "retro_exclude_run": LENGTH,
        "retro_query_gpus": "all",
    }
    readers: dict[str, set[str]] = {
        "retro_db": {"retro_sample_mode"},
        "retro_embed": {"pooling", "normalize"},
        "faiss_train": set(),
        "faiss_add": {"target_recall", "retro_min_recall"},
        "faiss_query": {"retro_exclude_evaluation", "retro_exclude_run", "retro_query_gpus"},
    }
    plain = {one.stage: one.argv() for one in planned(tmp_path)}
    for command in planned(tmp_path, **given):
        words = command.argv()
        for name, value in given.items():
            flag = f"--{name.replace('_', '-')}"
            assert flag not in plain[command.stage], "finished stages are not made again"
            assert (flag in words) == (name in readers[command.stage])
            if flag in words and value is not True:
                values = value if isinstance(value, list) else [str(value)]
                assert words[words.index(flag) + 1 :][: len(values)] == values
        parse_options(CONFIGS[command.stage], words[2:], None, None, [])


def test_a_function_of_a_package_embeds_instead_of_a_bert(tmp_path: Path) -> None:
    words = planned(tmp_path, load=None, embedder="ours")[1].argv()
    assert words[words.index("--embedder") + 1] == "ours"
    assert not {"--load", "--retro-bert-vocab-file"} & set(words)
    with pytest.raises(ConfigError, match=r"give --load .* or --embedder .*, not both"):
        planned(tmp_path, embedder="ours")


def test_validation_is_of_every_step_with_blocks(tmp_path: Path) -> None:
    checked = planned(tmp_path, retro_task_validate=0.5)
    assert [one.stage for one in checked] == [
        *(stage for stage in BUILT if stage != "faiss_train"),
        *(*FOUND, *FOUND),
    ]
    assert all(one.options["retro_task_validate"] == 0.5 for one in checked)
    index = {"retro_tasks": ["db-build,index-build"], "retro_query_gpus": "all"}
    assert len(planned(tmp_path, retro_task_validate=0.5, **index)) == len(BUILT) - 1


def test_relative_names_are_below_the_project(tmp_path: Path) -> None:
    words = planned(tmp_path)[0].argv()
    given = words[words.index("--data-path") + 1 :][:4]
    assert given == ["1.0", f"{tmp_path}/data/en", "1.0", f"{tmp_path}/data/de"]
    assert words[words.index("--retro-bert-vocab-file") + 1] == f"{tmp_path}/vocab.txt"


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    for more, message in (
        ({"retro_tasks": ["index-trian"]}, "--retro-tasks index-trian: .*index-train"),
        ({"load": None}, "embedding chunks needs --load"),
        ({"retro_index_ntrain": None}, "db-build needs --retro-index-ntrain"),
        ({"retro_gpt_seq_length": None}, "--retro-gpt-seq-length is needed"),
        ({"retro_task_validate": 2.0}, "--retro-task-validate must be above 0"),
        ({"retro_task_validate": 0.5, "retro_query_gpus": "all"}, "name the other tasks"),
    ):
        with pytest.raises(ConfigError, match=message):
            planned(tmp_path, **more)
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in options(tmp_path).items() if k.startswith("retro_gpt")})
    )
    with pytest.raises(ConfigError, match="retro_bert_tokenizer_type"):
        planned(tmp_path)


def test_an_index_that_the_sample_cannot_train_is_refused_before_the_first_chunk(
    tmp_path: Path,
) -> None:
    """39 vectors a list, of those that the load fraction leaves."""
    enough = {"retro_index_ntrain": 16 * 39, "retro_index_str": "OPQ8_16,IVF16_HNSW8,PQ8"}
    embed = planned(tmp_path, **enough)[1]
    assert embed.options["retro_index_str"] == enough["retro_index_str"]
    for more, message in (
        ({"retro_index_ntrain": 600}, r"its 16 lists need 624 .* --retro-index-ntrain 600 gives"),
        ({"retro_index_ntrain": 600}, r"raise it, or give an index of at most 15 lists"),
        ({"retro_index_train_load_fraction": 0.5}, r"load-fraction 0.5 gives 312"),
    ):
        for task in ("db-build", "index-train"):
            with pytest.raises(ConfigError, match=message):
                planned(tmp_path, **{**enough, **more}, retro_tasks=[task])
    planned(tmp_path, **{**enough, "retro_index_ntrain": 600}, retro_tasks=["query"])


def test_data_without_a_sample_of_a_split_is_refused_before_the_first_chunk(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for seed, name in enumerate(("en", "de")):
        write_corpus(tmp_path / "data" / name, sentences(60, seed))
    words = words_of(options(tmp_path, retro_gpt_split="99,1,0"))
    done = run_program("stages.retro_preprocess", *words, expect=2)
    assert "the valid split has" in done.err
    assert not (tmp_path / "db").exists()


# --- the whole of it --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_project_is_built_explored_and_not_built_again(tmp_path: Path) -> None:
    make = pytest.importorskip("tests.trainyard.embedding.encoders").make
    (tmp_path / "data").mkdir()
    for seed, name in enumerate(("en", "de")):
        write_corpus(tmp_path / "data" / name, sentences(60, seed))
    write_vocabulary(tmp_path)
    make(tmp_path / "bert")
    arguments = words_of(options(tmp_path))
    program = "stages.retro_preprocess"
    run_process(program, *arguments, seconds=600)
    project = read_project(str(tmp_path))
    assert project.config.retro_neighbor_dirs == {"train": "train", "valid": "valid", "test": None}
    rows = Neighbors(project.neighbors("train")).rows([0, 1, 2])
    assert rows.shape == (3, 4)
    retro = Retro.open(str(tmp_path))
    assert retro.get_pt_num_samples("train") == 24
    assert retro.get_db_num_chunks() > 100

    validate = ("--retro-task-validate", "0.5", "--retro-tasks", "db-build,index-add")
    checked = run_process(program, *arguments, *validate, seconds=600)
    for words in ("cut again", "computed again", "encoded again"):
        assert words in checked

    where = arguments[:4]  # the rest is in config.json
    again = run_process(program, *where, seconds=600)
    assert again.count("nothing to do") == len(BUILT) + 2 * len(FOUND)
    other = ("--retro-gpt-seq-length", str(2 * SEQ_LENGTH))
    refused = run_process(program, *where, *other, expect=2)
    assert "with which parts of the project were made" in refused
