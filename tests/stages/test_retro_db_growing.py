"""A chunk database that grows by documents, and one whose blocks are cut again to be compared; the
log's estimate of time."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import h5py
import pytest

import stages.retro_db.blocks as blocks
import stages.retro_db.run as stage
from stages.retro_db.config import RetroDbConfig
from stages.runtime.cli import stage_main
from tests.stages.test_retro_db import files
from tests.trainyard.retrieval.corpora import arrays, build, options, write_two
from trainyard.corpus.indexed import IndexedDataset


def publish(folder: Path, out: str, data_path: list[str], expect: int = 0, **more: Any) -> None:
    given = options(folder, data_path, output_dir=str(folder / out), **more)
    words = []
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    assert stage_main("retro_db", RetroDbConfig, "stages.retro_db.run", argv=words) == expect


def test_a_database_that_grew_is_the_one_that_was_built_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    english, german = write_two(tmp_path)
    publish(tmp_path, "old", [english], retro_doc_block_size=3)
    publish(tmp_path, "db", [english, german], retro_doc_block_size=3)
    wanted = files(tmp_path)
    base = str(tmp_path / "old")
    cut, original = [], stage.cut_job

    def cut_job(job: blocks.CutJob) -> Any:
        cut.append(job.block.dataset)
        return original(job)

    monkeypatch.setattr(stage, "cut_job", cut_job)
    publish(tmp_path, "db", [english, german], retro_doc_block_size=3, retro_base_db=base)
    found = files(tmp_path)
    assert found.pop("db/manifest.json") != wanted.pop("db/manifest.json"), "it names the base"
    assert found == wanted
    assert set(cut) <= {1}, "only the German chunks are cut"

    for data_path, more, message in (
        ([german, english], {}, "--data-path does not begin with the token files of these"),
        ([english, german], {"retro_gpt_split": "50,50,0"}, "--retro-gpt-split '50,50,0'"),
        ([english, german], {"retro_base_db": f"{base}/merged"}, "no finished database"),
    ):
        changed = {"retro_doc_block_size": 3, "retro_base_db": base, **more}
        publish(tmp_path, "no", data_path, expect=2, **changed)
        assert message in capsys.readouterr().err


def test_validation_finds_a_block_with_other_chunks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_path = write_two(tmp_path)
    publish(tmp_path, "db", data_path, retro_doc_block_size=3)
    publish(tmp_path, "db", data_path, retro_doc_block_size=3, retro_task_validate=1)
    assert "5 of 5 blocks cut again" in capsys.readouterr().out
    path = tmp_path / "db/individual/de/00-03.hdf5"
    held = arrays(path)
    held["chunks_valid"][1, 3] += 1
    with h5py.File(path, "r+") as file:
        file["chunks_valid"][...] = held["chunks_valid"]
    publish(tmp_path, "db", data_path, 1, retro_doc_block_size=3, retro_task_validate=1)
    assert "00-03.hdf5: chunks_valid is not what the token files give" in capsys.readouterr().err
    publish(tmp_path, "db", data_path, 2, retro_doc_block_size=2, retro_task_validate=1)
    assert "was made with 3; give the options that it was made with" in capsys.readouterr().err


def test_the_log_estimates_the_time_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    corpora = write_two(tmp_path)
    with caplog.at_level(logging.INFO, logger=stage.__name__):
        build(tmp_path, corpora, retro_doc_block_size=2)
    said = [one for one in caplog.messages if "estimated_minutes" in one]
    tokens = sum(IndexedDataset(prefix).sequence_lengths.sum() for prefix in corpora)
    assert said == [f"cutting tokens={tokens} estimated_minutes=0.0"]
