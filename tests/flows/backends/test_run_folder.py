"""Keys of submissions, and what a backend keeps in a run folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.backends.outcome import Kind
from flows.backends.run_folder import (
    StopRecord,
    is_being_cancelled,
    job_key,
    read_record,
    read_stop_record,
    submission_of,
    write_record,
    write_stop_record,
)
from flows.backends.spec import KEY, LaunchSpec
from trainyard.errors import ConfigError


def test_records_are_read_by_the_next_program(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("was_signalled", [False, True])
@pytest.mark.parametrize("kind", [Kind.STOPPED, Kind.HANG, Kind.TIME_LIMIT])
def test_ending_is_read_as_written(tmp_path: Path, kind: Kind, was_signalled: bool) -> None:
    spec = LaunchSpec(name="merge", command=("true",), run_directory=str(tmp_path))
    assert read_stop_record(tmp_path) is None
    assert not is_being_cancelled(spec)
    ending = StopRecord(kind=kind, was_signalled=was_signalled)
    write_stop_record(tmp_path, ending)
    assert read_stop_record(tmp_path) == ending
    assert is_being_cancelled(spec) is (kind is Kind.STOPPED)


# --- keys -----------------------------------------------------------------------------------------

RUN = "0193e1f6-6f0c-7d4b-b0a5-1f2e3d4c5b6a"


def test_a_key_is_the_same_in_every_process() -> None:
    assert job_key(RUN, "pretrain", 1) == "8272d2e01c353d77-1"


def test_run_task_and_count_each_make_another_key() -> None:
    keys = [
        job_key(run, task, count) for run in (RUN, "a") for task in ("ab", "b") for count in (1, 2)
    ]
    assert len(set(keys)) == 8
    assert job_key("a", "bc", 1) != job_key("ab", "c", 1)


def test_a_key_is_one_for_every_scheduler() -> None:
    key = job_key(RUN, "tokenize-train-00003", 12)
    assert KEY.fullmatch(key)
    assert len(key) <= 24
    assert submission_of(key) == 12


def test_submissions_count_from_1() -> None:
    with pytest.raises(ValueError, match="count from 1"):
        job_key(RUN, "pretrain", 0)
