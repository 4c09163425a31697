"""What a block keeps in a run folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.backends.outcome import Kind
from flows.backends.run_folder import (
    Ending,
    is_being_cancelled,
    read_ending,
    read_record,
    write_ending,
    write_record,
)
from flows.backends.spec import LaunchSpec
from trainyard.errors import ConfigError


def test_what_was_noted_is_read_by_who_comes_after(tmp_path: Path) -> None:
    path = tmp_path / "submitted.json"
    assert read_record(path, "merge-k-1") is None
    write_record(path, {"name": "merge-k-1", "job_id": "17"})
    write_record(path, {"name": "merge-k-1", "job_id": "18"})
    assert read_record(path, "merge-k-1") == {"name": "merge-k-1", "job_id": "18"}
    assert [one.name for one in tmp_path.iterdir()] == ["submitted.json"]


def test_a_folder_of_another_job_is_refused(tmp_path: Path) -> None:
    write_record(tmp_path / "note.json", {"name": "merge-k-1"})
    with pytest.raises(ConfigError, match=f"{tmp_path} belongs to job merge-k-1, not to merge-k-2"):
        read_record(tmp_path / "note.json", "merge-k-2")


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("kind", [Kind.STOPPED, Kind.HANG, Kind.TIME_LIMIT])
def test_an_ending_is_taken_over_by_who_comes_after(
    tmp_path: Path, kind: Kind, is_told: bool
) -> None:
    spec = LaunchSpec(name="merge", command=("true",), run_directory=str(tmp_path))
    assert read_ending(tmp_path) is None
    assert not is_being_cancelled(spec)
    ending = Ending(kind=kind, was_signalled=is_told)
    write_ending(tmp_path, ending)
    assert read_ending(tmp_path) == ending
    assert is_being_cancelled(spec) is (kind is Kind.STOPPED)
