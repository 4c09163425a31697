"""What a step of a real run was made of, by the ledger, and where a line of its text was served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.blame.answer import Answer, table
from stages.blame.config import BlameConfig
from stages.blame.run import run
from stages.blame.run_description import describe
from stages.index.config import IndexConfig
from stages.index.run import run as build_indices
from stages.merge.config import MergeConfig
from stages.merge.run import run as merge
from stages.runtime.context import StageRun
from tests.stages.directly import run_directly
from tests.stages.pretrain_runs import OPTIONS as PRETRAIN
from tests.stages.pretrain_runs import Pretrain, settled_pair
from tests.trainyard.datasets.test_gpt import write_pair
from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest, publish
from trainyard.config import from_dict
from trainyard.corpus.indexed import IndexedDataset
from trainyard.corpus.provenance.origins import ProvenanceWriter
from trainyard.errors import ArtifactError, ConfigError, DataError

pytestmark = pytest.mark.slow

LINES = 20
RUN = {name: PRETRAIN[name] for name in ("seq_length", "train_iters", "global_batch_size")}
RUN |= {"micro_batch_size": 2, "split": PRETRAIN["split"]}


def write_sidecar(prefix: str, num_documents: int) -> None:
    """Two sources of LINES lines each, 100 bytes a line."""
    writer = ProvenanceWriter()
    for k in range(num_documents):
        source, line = divmod(k, LINES)
        name = f"s3://raw/{Path(prefix).name}/part-{source}.jsonl"
        writer.add(name, 100 * line, 99, line + 1, f"id-{k}")
    with open(f"{prefix}.docs", "wb") as file:
        writer.write(file)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokens")
    for name, first in (("a", 0), ("b", 500)):
        write_sidecar(settled_pair(folder / name, [30] * 2 * LINES, first), 2 * LINES)
    return str(folder)


def blend(tokens: str) -> list[str]:
    return ["0.3", f"{tokens}/a", "0.7", f"{tokens}/b"]


@pytest.fixture(scope="module")
def trained(pretrain: Pretrain, tokens: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on a blend."""
    folder = tmp_path_factory.mktemp("run") / "run"
    pretrain(folder, data_path=blend(tokens))
    return folder


def blame_of(**options: Any) -> None:
    run(from_dict(BlameConfig, options), StageRun("blame", {}, None))


def ask(capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:
    capsys.readouterr()
    blame_of(json=True, max_rows=0, **options)
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["total"] == len(document["rows"])
    return document


def test_every_step_matches_the_ledger_and_its_sources_lead_back_to_it(
    trained: Path, tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[dict[str, Any]] = []
    for step in range(1, 9):
        found = ask(capsys, load=str(trained), step=step)
        assert found["checked_steps"] == 1
        assert {row["step"] for row in found["rows"]} == {step}
        assert {(row["micro_batch"], row["row"]) for row in found["rows"]} == {
            (m, r) for m in range(2) for r in range(2)
        }
        served += found["rows"]
    for row in served[:: len(served) // 8]:
        back = ask(capsys, load=str(trained), source=row["source"], id=row["id"])["rows"]
        again = ask(capsys, load=str(trained), source=row["source"], line=row["line"])["rows"]
        assert (
            back
            == again
            == [r for r in served if (r["source"], r["id"]) == (row["source"], row["id"])]
        )
        files = {name: IndexedDataset(f"{tokens}/{name}") for name in "ab"}
        document = files[row["dataset"][-1]].get(row["document"])
        assert row["line"] == row["document"] % LINES + 1
        assert row["offset"] == 100 * (row["line"] - 1)
        assert 0 <= row["tokens"][0] < row["tokens"][1] <= len(document)


def test_parts_that_were_not_merged_lead_to_the_same_sources(
    pretrain: Pretrain, tokens: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    answers = []
    for name, is_virtual in (("merged", False), ("virtual", True)):
        prefix, folder = str(tmp_path / name), tmp_path / f"run-{name}"
        run_directly(MergeConfig, merge, input=[tokens], output_prefix=prefix, virtual=is_virtual)
        pretrain(folder, data_path=[prefix])
        step = ask(capsys, load=str(folder), step=3)
        of_line = ask(capsys, load=str(folder), source="b/part-1.jsonl", line=7)
        of_id = ask(capsys, load=str(folder), source="a/part-0.jsonl", id="id-3")
        for answer in (step, of_line, of_id):
            assert answer["checked_steps"] > 0
            for row in answer["rows"]:
                assert row.pop("dataset") == prefix
            del answer["unchecked_sidecars"]
        answers.append([step, of_line, of_id, (folder / "ledger.jsonl").read_text()])
    assert answers[0] == answers[1]


def test_the_options_of_the_run_give_the_same_answer_as_the_run(
    trained: Path, tokens: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    by_run = ask(capsys, load=str(trained), sample=17)["rows"]
    options = {**RUN, "data_path": blend(tokens)}
    assert ask(capsys, sample=17, **options)["rows"] == by_run
    assert ask(capsys, load=str(trained / "iter_0000003"), sample=17)["rows"] == by_run
    assert ask(capsys, load=str(trained), data_path=blend(tokens), sample=17)["rows"] == by_run
    numbers = {key: RUN[key] for key in RUN if key != "micro_batch_size"}
    ahead = {**numbers, "data_path": blend(tokens), "output_dir": str(tmp_path / "i")}
    run_directly(IndexConfig, build_indices, **ahead)
    before = sorted(path.name for path in (tmp_path / "i").iterdir())
    cached = ask(capsys, sample=17, **options, data_cache_path=str(tmp_path / "i"))
    assert cached["rows"] == by_run
    ask(capsys, sample=17, **{**options, "seed": 5}, data_cache_path=str(tmp_path / "i"))
    assert sorted(path.name for path in (tmp_path / "i").iterdir()) == before  # it only reads


def test_ranks_share_a_step(tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = {**RUN, "data_path": [f"{tokens}/a"], "data_parallel_size": 2, "step": 3}
    whole = ask(capsys, **options)["rows"]
    parts = [
        ask(capsys, **options, rank=rank, row=row)["rows"] for rank in (0, 1) for row in (0, 1)
    ]
    assert [row for part in parts for row in part] == whole
    assert {row["sample"] for row in whole} == set(range(8, 12))
    assert {row["micro_batch"] for row in whole} == {0}


def test_cyclic_order_is_reproduced(tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = {**RUN, "train_iters": 40, "data_path": [f"{tokens}/a"], "dataloader_type": "cyclic"}
    (first, *_) = ask(capsys, **options, step=30, micro_batch=1, row=0)["rows"]
    rows = ask(capsys, **options, sample=first["sample"])["rows"]
    assert first in rows
    every = ask(capsys, **options, source="part-0.jsonl")
    for most in (1, 50, every["total"]):
        capsys.readouterr()
        blame_of(json=True, max_rows=most, **options, source="part-0.jsonl")
        less = json.loads(capsys.readouterr().out)
        assert less == {**every, "rows": every["rows"][:most]}


def test_table_shows_sources_and_count(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    source = "a/part-1.jsonl"
    blame_of(load=str(trained), source=source, max_rows=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:5] == ["step", "micro-batch", "rank", "row", "sample"]
    assert "s3://raw/a/part-1.jsonl" in lines[1]
    assert "id-" in lines[1]
    assert " more; --max-rows 0 shows all" in lines[4]
    assert table(Answer((), 0, 0)) == "no training sample of the run contains any of it"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "one of --step"),
        ({"step": 1, "sample": 2}, "one of --step"),
        ({"sample": 2, "rank": 0}, "--rank requires --step"),
        ({"step": 1, "line": 3}, "--line requires --source"),
        ({"step": 0}, "--step must be at least 1"),
        ({"step": 9}, "--step 9: the run has 8"),
        ({"step": 1, "rank": 1}, "--rank 1: step 1 of this run has 1"),
        ({"sample": 99_999}, "--sample 99999"),
        ({"source": "c.jsonl"}, "not a source of these token files, which are s3://raw/"),
        ({"source": "part-0.jsonl", "line": 77}, "--line 77: no document"),
        ({"source": "part-0.jsonl", "id": "x"}, "--id x: no document"),
        ({"step": 1, "train_iters": 7}, "--train-iters 7: the run of --load has 8"),
        ({"step": 1, "split": "1,0,0"}, "--split '1,0,0': the run of --load has '90,10,0'"),
        ({"step": 1, "data_path": ["{tokens}/a"]}, "no input data_0"),
    ],
)
def test_a_wrong_question_is_refused(
    trained: Path, tokens: str, options: dict[str, Any], words: str
) -> None:
    paths = {
        key: [v.format(tokens=tokens) for v in value]
        for key, value in options.items()
        if key == "data_path"
    }
    with pytest.raises(ConfigError, match=words):
        blame_of(load=str(trained), **{**options, **paths})


def test_without_load_the_options_of_the_run_are_needed(tokens: str) -> None:
    for name in ("seq_length", "train_iters", "global_batch_size", "micro_batch_size"):
        less = {key: value for key, value in RUN.items() if key != name}
        with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
            describe(from_dict(BlameConfig, {**less, "step": 1, "data_path": [f"{tokens}/a"]}))
    with pytest.raises(ConfigError, match="--mock-data is mock data"):
        blame_of(**RUN, step=1, mock_data=True)
    with pytest.raises(ConfigError, match="--data-path or --load"):
        describe(from_dict(BlameConfig, {**RUN, "step": 1}))


def test_token_files_of_another_run_are_refused(
    trained: Path, tokens: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        write_pair(tmp_path / name, [30] * 2 * LINES, 7)
    other = {"load": str(trained), "step": 2, "data_path": blend(str(tmp_path))}
    with pytest.raises(DataError, match="not the token files of the run"):
        blame_of(**other)
    rows = ask(capsys, **other, check_data=False)["rows"]
    assert {row["source"] for row in rows} == {None}  # no sidecars there
    write_pair(tmp_path / "a", [30] * 3 * LINES)
    with pytest.raises(DataError, match="the ledger of the run has"):
        blame_of(**other, check_data=False)


def test_a_sidecar_of_another_pair_is_refused(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "t", [30] * 40)
    write_sidecar(prefix, 39)
    with pytest.raises(ArtifactError, match="has 39 documents"):
        blame_of(**RUN, data_path=[prefix], step=1)


def test_listed_sidecar_is_trusted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_pair(tmp_path / "t_text_document", [30] * 40)
    write_sidecar(prefix, 40)
    asked: dict[str, Any] = {**RUN, "data_path": [prefix], "sample": 1}
    assert ask(capsys, **asked)["unchecked_sidecars"] == [f"{prefix}.docs"]
    blame_of(**asked)
    assert f"{prefix}.docs could not be checked: no manifest lists" in capsys.readouterr().out
    files = tuple(
        store.write_bytes(prefix + end, Path(prefix + end).read_bytes(), "_text_document" + end)
        for end in (".bin", ".idx", ".docs")
    )
    publish(str(tmp_path / "t.manifest.json"), Manifest(stage="tokenize", files=files), None)
    found = ask(capsys, **asked)
    assert found["unchecked_sidecars"] == []
    assert found["rows"][0]["source"] == "s3://raw/t_text_document/part-0.jsonl"
    data = Path(f"{prefix}.docs").read_bytes()
    for other in (data.replace(b"part-0", b"part-7"), data.replace(b"part-0", b"part-70")):
        Path(f"{prefix}.docs").write_bytes(other)  # of another pair with as many documents
        with pytest.raises(ArtifactError, match=r"is not the one that|sidecar|bytes"):
            blame_of(**asked)


def test_an_unfinished_run_has_options_but_no_data_paths(
    trained: Path, tokens: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("iter_0000003", "iter_0000006"):
        shutil.copytree(trained / name, tmp_path / "run" / name)
    load = str(tmp_path / "run")
    with pytest.raises(ConfigError, match="not finished has no manifest"):
        ask(capsys, load=load, step=2)
    found = ask(capsys, load=load, step=2, data_path=blend(tokens))
    assert found["checked_steps"] == 1
    assert found["rows"] == ask(capsys, load=str(trained), step=2)["rows"]
    assert np.all([row["rank"] == 0 for row in found["rows"]])


# --- runs that resumed on another number of ranks -----------------------------------------------


@pytest.fixture
def recorded(trained: Path, tmp_path: Path) -> Callable[..., str]:
    """The run with other recorded (first step, last step, ranks), or none."""

    def copy(*spans: tuple[int, int, int], unknown: bool = False) -> str:
        shutil.copytree(trained, tmp_path / "copy", dirs_exist_ok=True)
        names = ("first_step", "last_step", "data_parallel_size", "micro_batch_size")
        for path in tmp_path.glob("copy/iter_*/manifest.json"):
            document = json.loads(path.read_text())
            step = json.loads((path.parent / "state.json").read_text())["step"]
            found = [dict(zip(names, (*span, 2), strict=True)) for span in spans if span[1] <= step]
            document["run"] = {} if unknown else {"spans": found}
            path.write_text(json.dumps(document))
        return str(tmp_path / "copy")

    return copy


def test_a_run_records_the_ranks_of_its_steps(trained: Path) -> None:
    document = json.loads((trained / "iter_0000006/manifest.json").read_text())
    (span,) = document["run"]["spans"]
    assert span == {
        **{"first_step": 1, "last_step": 6},
        **{"data_parallel_size": 1, "micro_batch_size": 2},
    }


def test_each_step_is_placed_by_its_own_ranks(
    recorded: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    load = recorded((1, 3, 2), (4, 8, 1))
    before, after = (ask(capsys, load=load, step=step) for step in (3, 4))
    assert {(row["micro_batch"], row["rank"]) for row in before["rows"]} == {(0, 0), (0, 1)}
    assert {(row["micro_batch"], row["rank"]) for row in after["rows"]} == {(0, 0), (1, 0)}
    for found in (before, after):
        assert found["checked_steps"] == 1
        row = found["rows"][0]
        back = ask(capsys, load=load, source=row["source"], id=row["id"])["rows"]
        assert row in back
        assert row in ask(capsys, load=load, sample=row["sample"])["rows"]
    with pytest.raises(ConfigError, match=r"steps 1 to 3 .* ran on 2 data-parallel ranks"):
        blame_of(load=load, step=2, data_parallel_size=1)
    assert ask(capsys, load=load, step=5, data_parallel_size=1)["rows"]
    with pytest.raises(ConfigError, match="--rank 1: step 4 of this run has 1"):
        blame_of(load=load, step=4, rank=1)


def test_without_the_number_of_ranks_rank_and_row_are_unknown(
    recorded: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    load = recorded(unknown=True)
    rows = ask(capsys, load=load, step=3)["rows"]
    assert {(row["micro_batch"], row["rank"], row["row"]) for row in rows} == {(None,) * 3}
    assert "steps 3: their number of data-parallel ranks is not recorded" in caplog.text
    blame_of(load=load, step=3)
    table = capsys.readouterr().out
    assert table.splitlines()[1].split()[:4] == ["3", "?", "?", "?"]
    assert "1 step checked: their samples are those of the ledger" in table
    with pytest.raises(ConfigError, match="--rank 0: the number of data-parallel ranks"):
        blame_of(load=load, step=3, rank=0)
    found = ask(capsys, load=load, step=3, rank=1, data_parallel_size=2)["rows"]
    assert {row["sample"] for row in found} == {10, 11}


# --- runs whose batches grow --------------------------------------------------------------------

GROWING = {"train_samples": 40, "rampup_batch_size": [2, 2, 12], "global_batch_size": 8}
SIZES = [2, 2, 4, 6, 8, 8, 8]  # 2 up to 4 consumed samples, 4 up to 8, 6 up to 12


def test_growing_batches_are_located(
    pretrain: Pretrain, tokens: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = {**GROWING, "dataloader_type": "cyclic", "data_path": blend(tokens)}
    pretrain(tmp_path / "run", **shared, train_iters=None)
    load = str(tmp_path / "run")
    same = {**RUN, **shared}
    del same["train_iters"]
    for step, size in enumerate(SIZES, 1):
        found = ask(capsys, load=load, step=step)
        assert found["checked_steps"] == 1
        places = {(row["micro_batch"], row["rank"], row["row"]) for row in found["rows"]}
        assert places == {(m, 0, r) for m in range(size // 2) for r in range(2)}
        assert ask(capsys, step=step, **same)["rows"] == found["rows"]
        row = found["rows"][0]
        assert row in ask(capsys, load=load, sample=row["sample"])["rows"]
    with pytest.raises(ConfigError, match="--step 8: the run has 7"):
        blame_of(load=load, step=8)
    with pytest.raises(ConfigError, match=r"--rampup-batch-size .*: the run of --load has"):
        blame_of(load=load, step=1, rampup_batch_size=[2, 2, 16])


def test_invalid_spans_are_refused(recorded: Callable[..., str]) -> None:
    with pytest.raises(ArtifactError, match="invalid spans"):
        blame_of(load=recorded((1, 5, 2), (4, 8, 1)), step=1)


# --- documents of a cleaned corpus ------------------------------------------------------------
