"""An output that its disk has no room for is refused before any work."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest

from stages.runtime.context import StageRun
from stages.runtime.disk_space import check_disk
from trainyard.artifacts.output import Output
from trainyard.errors import ConfigError


def check(url: str, needed: int) -> None:
    stage = StageRun("test", {}, Output.directory(url), "lineage")
    with contextlib.closing(stage):
        check_disk(stage, needed, "40 embeddings", "write to another disk")


def test_the_disk_of_a_folder_that_is_not_there_yet_is_asked(tmp_path: Path) -> None:
    free, url = shutil.disk_usage(tmp_path).free, str(tmp_path / "a/b")
    check(url, free // 2)
    said = r"a/b: 40 embeddings take [\d,.]+ GB of disk, and [\d,.]+ GB are free there; write to"
    with pytest.raises(ConfigError, match=said):
        check(url, 2 * free)
    assert not (tmp_path / "a").exists()


def test_a_store_has_room() -> None:
    check("s3://bucket/a", 2**60)
