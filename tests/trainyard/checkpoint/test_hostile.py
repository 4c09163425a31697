"""Hostile documents and links in checkpoints are refused by name; see also test_hostile_files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.trainyard.checkpoint.hostile import (
    MODEL,
    NAME,
    edited,
    load,
    make_step,
    refusal,
    vouch,
)
from trainyard.artifacts.digest import digest_files
from trainyard.checkpoint.load import open_checkpoint
from trainyard.checkpoint.steps import find_steps
from trainyard.errors import ArtifactError, ConfigError, TrainyardError

SECRET = b"secret of another folder"


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return make_step(tmp_path)


def test_what_is_not_hostile_is_loaded(step: Path) -> None:
    load(step)
    vouch(step)
    load(step)
    inner = step / "tokenizer" / "vocab.json"
    inner.parent.mkdir()
    inner.symlink_to(step / "config.json")  # a link that stays inside
    moved = step.with_name("elsewhere")
    step.rename(moved)
    step.symlink_to(moved)  # so may the step itself be
    load(step)


# --- names --------------------------------------------------------------------------------------

NAMES = ["../outside.safetensors", "/etc/passwd", "sub/a.safetensors", "a.pt", "", ".safetensors"]
NAMES += [
    "..\\a.safetensors",
    "a\0.safetensors",
    "s3://bucket/a.safetensors",
    "\u202ea.safetensors",
]


@pytest.mark.parametrize("name", NAMES)
def test_an_index_that_names_files_elsewhere_is_refused(step: Path, name: str) -> None:
    (step.parent / "outside.safetensors").write_bytes((step / MODEL).read_bytes())
    edited(step, "index.json", lambda d: d["tensors"][NAME]["pieces"][0].update(file=name))
    assert "index.json: tensor 'model.a': file name" in refusal(step)


@pytest.mark.parametrize("name", ["../run/x", "/etc/passwd", "a//b", "a/../../b", "a\\b"])
def test_a_manifest_that_lists_files_elsewhere_is_refused(step: Path, name: str) -> None:
    def list_it(document: Any) -> None:
        document["files"].append({**document["files"][0], "path": name})
        files = ((f["path"], f["size_bytes"], f["digest"]) for f in document["files"])
        document["output_digest"] = digest_files(files)

    edited(step, "manifest.json", list_it)
    assert "manifest.json" in refusal(step)


def test_a_file_that_the_manifest_does_not_list_is_not_read(step: Path) -> None:
    vouch(step, ["index.json", "state.json", "config.json"])
    assert f"names {MODEL}, which manifest.json does not list" in refusal(step)


@pytest.mark.parametrize("name", ["model\n.a", "model.\x1b[2J", "model.\ud800", "weights.a", "a"])
def test_names_of_tensors_are_names(step: Path, name: str) -> None:
    def rename(document: Any) -> None:
        document["tensors"][name] = document["tensors"].pop("model.b")

    edited(step, "index.json", rename)
    assert "index.json" in refusal(step)


# --- links and pipes ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [MODEL, "index.json", "state.json", "config.json"])
def test_a_link_out_of_the_step_is_not_followed(step: Path, name: str) -> None:
    outside = step.parent.parent / f"outside-{name}"
    (step / name).rename(outside)
    (step / name).symlink_to(outside)
    assert f"{name}: a link to {outside}, outside the step" in refusal(step)


def test_a_manifest_that_is_a_link_is_not_read(step: Path) -> None:
    outside = step.parent.parent / "manifest.json"
    (step / "manifest.json").rename(outside)
    (step / "manifest.json").symlink_to(outside)
    assert "manifest.json: a link" in refusal(step)


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_tokenizer_that_lies_elsewhere_is_refused(step: Path, is_folder: bool) -> None:
    outside = step.parent.parent / "secrets"
    outside.mkdir()
    (outside / "tokenizer.json").write_bytes(SECRET)
    if is_folder:
        (step / "tokenizer").symlink_to(outside)
    else:
        (step / "tokenizer").mkdir()
        (step / "tokenizer" / "tokenizer.json").symlink_to(outside / "tokenizer.json")
    assert "outside the step" in refusal(step)


@pytest.mark.parametrize("name", [MODEL, "index.json", "state.json", "manifest.json"])
def test_a_pipe_is_not_waited_for(step: Path, name: str) -> None:
    (step / name).unlink()
    os.mkfifo(step / name)
    with pytest.raises((ArtifactError, ConfigError), match=str(step)):
        load(step)


def test_a_link_to_itself_is_a_fault_of_the_folder(step: Path) -> None:
    (step / MODEL).unlink()
    (step / MODEL).symlink_to(MODEL)
    with pytest.raises(TrainyardError, match=MODEL):
        load(step)


# --- documents ----------------------------------------------------------------------------------

BROKEN = {
    "not json": "{",
    "not text": b"\xff\xfe\x00\xd8",
    "nothing": "",
    "nested": "[" * 100_000,
    "nested tables": '{"a":' * 30_000 + "1" + "}" * 30_000,
    "a long number": '{"format_version": 1, "step": ' + "9" * 5000 + "}",
    "NaN": '{"format_version": 1, "step": NaN}',
    "infinity": '{"format_version": 1, "step": -Infinity}',
    "too large": '{"format_version": 1, "step": 1e999}',
    "twice": '{"format_version": 1, "step": 50, "step": 60}',
    "twice within": '{"format_version": 1, "step": 50, "a": [{"b": 1, "b": 2}]}',
    "a list": "[1]",
    "no version": "{}",
    "a version that is none": '{"format_version": true}',
}


@pytest.mark.few_cases(20)
@pytest.mark.parametrize("name", ["index.json", "state.json", "config.json", "manifest.json"])
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_document_is_refused(step: Path, name: str, what: str) -> None:
    data = BROKEN[what]
    (step / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    if name != "manifest.json":
        vouch(step)
    assert name in refusal(step)


@pytest.mark.parametrize(
    "files",
    [
        None,
        7,
        [{"path": MODEL}],
        [{"path": 5, "size_bytes": 1, "digest": "a", "volatile": False}],
        [{"path": MODEL, "size_bytes": "1", "digest": "a", "volatile": False}],
        [{"path": MODEL, "size_bytes": -1, "digest": "a", "volatile": False}],
        [{"path": MODEL, "size_bytes": 1, "digest": None, "volatile": False}],
        [{"path": MODEL, "size_bytes": 1, "digest": "a", "volatile": False}] * 2,
        [{"path": MODEL, "size_bytes": 1, "digest": "a", "volatile": False, "more": 1}],
    ],
)
def test_a_manifest_of_no_files_is_refused(step: Path, files: Any) -> None:
    edited(step, "manifest.json", lambda d: d.update(files=files))
    assert "manifest.json" in refusal(step)


def test_a_manifest_without_its_digest_is_refused(step: Path) -> None:
    edited(step, "manifest.json", lambda d: d.pop("output_digest"))
    assert "output digest" in refusal(step)


@pytest.mark.parametrize("value", [None, -1, 2.5, "50", True, 10**30, [50]])
def test_a_step_that_is_no_count_is_refused(step: Path, value: Any) -> None:
    edited(step, "state.json", lambda d: d.update(step=value))
    assert "step" in refusal(step)


def test_a_document_as_deep_as_a_parser_allows_is_refused(step: Path) -> None:
    deep: Any = 1
    for _ in range(300):
        deep = {"a": deep}
    edited(step, "config.json", lambda d: d.update(model=deep))
    assert "config.json: nested too deeply" in refusal(step)


# --- the index ----------------------------------------------------------------------------------

COUNTS: list[Any] = [
    [-1, 6],
    [4, 2**63],
    [2**62, 2**62],
    [0, 2**62, 2**62],
    [4.0, 6],
    ["4", 6],
    [True, 24],
    None,
    {"0": 4},
    [1] * 65,
    [10**4000] * 60,
]


@pytest.mark.few_cases(8)
@pytest.mark.parametrize("value", COUNTS)
@pytest.mark.parametrize("of", ["shape", "offset", "whole"])
def test_shapes_and_offsets_are_counts(step: Path, of: str, value: Any) -> None:
    def change(document: Any) -> None:
        entry = document["tensors"][NAME]
        target = entry if of == "whole" else entry["pieces"][0]
        target["shape" if of == "whole" else of] = value

    edited(step, "index.json", change)
    text = refusal(step)
    assert "index.json" in text
    assert len(text) < 1000


def consistent(document: Any, shape: list[int]) -> None:
    entry = document["tensors"][NAME]
    entry["shape"] = entry["pieces"][0]["shape"] = shape
    entry["pieces"][0]["offset"] = [0] * len(shape)


@pytest.mark.parametrize("shape", [[2**40, 2**20], [2**59], [4, 7], [2, 6], [24], [6, 4], []])
def test_an_index_of_other_shapes_than_the_file_has_is_refused_before_memory_is_had(
    step: Path, shape: list[int]
) -> None:
    edited(step, "index.json", lambda d: consistent(d, shape))
    with (
        pytest.raises(ArtifactError, match=r"index\.json:? (says|tensor)"),
        open_checkpoint(str(step)) as checkpoint,
    ):
        checkpoint.read(NAME)


@pytest.mark.parametrize("dtype", ["BF16", "I32", "F64", "PICKLE", "f32", None, 5])
def test_an_index_of_other_types_than_the_file_has_is_refused(step: Path, dtype: Any) -> None:
    edited(step, "index.json", lambda d: d["tensors"][NAME].update(dtype=dtype))
    vouch(step)
    with (
        pytest.raises(ArtifactError, match=r"index\.json"),
        open_checkpoint(str(step)) as checkpoint,
    ):
        checkpoint.read(NAME)


def piece(offset: list[int], shape: list[int]) -> dict[str, Any]:
    return {"file": MODEL, "key": f"{NAME}@{offset}", "offset": offset, "shape": shape}


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([piece([0, 0], [4, 4]), piece([0, 3], [4, 3])], "overlap"),
        ([piece([0, 0], [4, 6]), piece([0, 0], [4, 6])], "overlap"),
        ([piece([0, 0], [2, 6]), piece([3, 0], [1, 6])], "hold 18 of 24"),
        ([piece([0, 0], [2, 6]), piece([1, 0], [2, 6])], "overlap"),
        ([piece([0, 0], [4, 7])], "outside"),
        ([], "hold 0 of 24"),
        ([7], "not an index"),
        ({"a": 1}, "not an index"),
        ([{"file": MODEL}], "not an index"),
        ([{**piece([0, 0], [4, 6]), "file": None}], "not an index"),
    ],
)
def test_pieces_that_are_no_exact_cover_are_refused(step: Path, pieces: Any, words: str) -> None:
    edited(step, "index.json", lambda d: d["tensors"][NAME].update(pieces=pieces))
    assert words in refusal(step)


def test_pieces_that_would_take_hours_to_check_are_refused_at_once(step: Path) -> None:
    count = 10_000  # a staircase: none overlaps, and each lies beside all others
    stairs = [piece([i, i], [count - i, 1]) for i in range(count)]
    document = {"dtype": "F32", "shape": [count, count], "pieces": stairs}
    edited(step, "index.json", lambda d: d["tensors"].update({NAME: document}))
    assert "no layout of ranks" in refusal(step)


def test_a_name_that_the_index_has_twice_is_refused(step: Path) -> None:
    text = (step / "index.json").read_text()
    line = next(line for line in text.splitlines() if f'"{NAME}"' in line)
    (step / "index.json").write_text(text.replace(line, f"{line}\n{line}"))
    vouch(step)
    assert f"'{NAME}' is given twice" in refusal(step)


# --- runs ---------------------------------------------------------------------------------------


def test_folders_that_only_look_like_steps_are_passed_over(step: Path) -> None:
    for name in ("iter_50", "iter_00000050", "iter_-000001", "iter_" + "9" * 200, "iter_0000060x"):
        (step.parent / name).mkdir()
        (step.parent / name / "manifest.json").write_bytes((step / "manifest.json").read_bytes())
    assert find_steps(str(step.parent)) == [50, int("9" * 200)]
    with pytest.raises((ArtifactError, ConfigError)):
        open_checkpoint(str(step.parent))
