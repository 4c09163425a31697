"""What a block keeps in a run folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.backends.notes import (
    Ending,
    is_being_cancelled,
    read_ending,
    read_note,
    write_ending,
    write_note,
)
from flows.backends.outcome import Kind
from flows.backends.spec import LaunchSpec
from trainyard.errors import ConfigError


def test_what_was_noted_is_read_by_who_comes_after(tmp_path: Path) -> None:
    path = tmp_path / "submitted.json"
    assert read_note(path, "merge-k-1") is None
    write_note(path, {"name": "merge-k-1", "job_id": "17"})
    write_note(path, {"name": "merge-k-1", "job_id": "18"})
    assert read_note(path, "merge-k-1") == {"name": "merge-k-1", "job_id": "18"}
    assert [one.name for one in tmp_path.iterdir()] == ["submitted.json"]


def test_a_folder_of_another_job_is_refused(tmp_path: Path) -> None:
    write_note(tmp_path / "note.json", {"name": "merge-k-1"})
    with pytest.raises(ConfigError, match=f"{tmp_path} is of job merge-k-1, not of merge-k-2"):
        read_note(tmp_path / "note.json", "merge-k-2")


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("kind", [Kind.STOPPED, Kind.HANG, Kind.TIME_LIMIT])
def test_an_ending_is_taken_over_by_who_comes_after(
    tmp_path: Path, kind: Kind, is_told: bool
) -> None:
    spec = LaunchSpec(name="merge", command=("true",), run_directory=str(tmp_path))
    assert read_ending(tmp_path) is None
    assert not is_being_cancelled(spec)
    ending = Ending(kind=kind, is_told=is_told)
    write_ending(tmp_path, ending)
    assert read_ending(tmp_path) == ending
    assert is_being_cancelled(spec) is (kind is Kind.STOPPED)
