"""A chunk database in shares: some blocks each, joined to the bytes of one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import stages.retro_db.run as stage
from stages.retro_db.blocks import CutJob
from tests.stages.test_retro_db import files
from tests.stages.test_retro_db_growing import publish
from tests.trainyard.retrieval.corpora import write_two

BLOCKS = 5
"""Three of the English corpus, two of the German one."""


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the blocks that are cut."""
    names, original = [], stage.cut_job

    def cut_job(job: CutJob) -> Any:
        names.append(job.block.name)
        return original(job)

    monkeypatch.setattr(stage, "cut_job", cut_job)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, BLOCKS + 1])
def test_joined_shares_are_the_bytes_of_one_run(count: int, tmp_path: Path, cut: list[str]) -> None:
    data_path, given = write_two(tmp_path), {"retro_doc_block_size": 3}
    publish(tmp_path, "db", data_path, **given)
    wanted, each_once = files(tmp_path), sorted(cut)
    assert len(set(each_once)) == BLOCKS
    cut.clear()
    (tmp_path / "db").rename(tmp_path / "whole")
    for rank in reversed(range(count)):
        publish(tmp_path, "db", data_path, rank=rank, world_size=count, **given)
    assert sorted(cut) == each_once, "each block by one share"
    publish(tmp_path, "db", data_path, world_size=count, **given)
    publish(tmp_path, "db", data_path, rank=0, world_size=count, **given)  # a task tried again
    assert sorted(cut) == each_once, "the join cuts none"
    found = files(tmp_path)
    del found["db/manifest.json"], wanted["db/manifest.json"]
    assert found == wanted
    assert not (tmp_path / "db.shares").exists()


@pytest.mark.slow
def test_shares_take_blocks_from_a_base_too(tmp_path: Path, cut: list[str]) -> None:
    english, german = write_two(tmp_path)
    given: dict[str, Any] = {"retro_doc_block_size": 3}
    publish(tmp_path, "old", [english], **given)
    publish(tmp_path, "db", [english, german], **given)
    wanted = files(tmp_path)
    (tmp_path / "db").rename(tmp_path / "whole")
    cut.clear()
    given |= {"retro_base_db": str(tmp_path / "old"), "world_size": 2}
    for rank in range(2):
        publish(tmp_path, "db", [english, german], rank=rank, **given)
    publish(tmp_path, "db", [english, german], **given)
    assert len(cut) == len(set(cut)) == 2, "the German blocks"
    found = files(tmp_path)
    del found["db/manifest.json"], wanted["db/manifest.json"]
    assert found == wanted


def test_missing_shares_and_damaged_ones_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_path = write_two(tmp_path)
    given: dict[str, Any] = {"retro_doc_block_size": 3, "world_size": 2}
    publish(tmp_path, "db", data_path, rank=0, **given)
    publish(tmp_path, "db", data_path, expect=1, **given)
    assert "of 2 shares, those of rank 1 are not made yet" in capsys.readouterr().err
    publish(tmp_path, "db", data_path, rank=1, **given)
    block = next((tmp_path / "db.shares/00001-of-00002").rglob("*.hdf5"))
    data = bytearray(block.read_bytes())
    data[-1] ^= 1
    block.write_bytes(data)
    publish(tmp_path, "db", data_path, expect=1, **given)
    assert str(block) in capsys.readouterr().err


def test_a_share_validates_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = {"world_size": 2, "retro_task_validate": 0.5}
    publish(tmp_path, "db", write_two(tmp_path), expect=2, **more)
    assert "leave --world-size out" in capsys.readouterr().err
