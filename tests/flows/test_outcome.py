"""What the end of a job means."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from flows.launch.outcome import Kind, StageError, classify, read_failure, read_outcome


@pytest.mark.parametrize(
    ("code", "kind", "status"),
    [
        (0, Kind.DONE, 0),
        (1, Kind.DATA, 1),
        (2, Kind.CONFIG, 2),
        (3, Kind.INFRASTRUCTURE, 3),
        (70, Kind.DEFECT, 70),
        (130, Kind.STOPPED, 130),
        (143, Kind.STOPPED, 143),
        (-15, Kind.STOPPED, 143),
        (-2, Kind.STOPPED, 130),
        (-9, Kind.INFRASTRUCTURE, 3),
        (137, Kind.INFRASTRUCTURE, 3),
        (-11, Kind.DEFECT, 70),
        (139, Kind.DEFECT, 70),
        (5, Kind.DEFECT, 70),
    ],
)
def test_an_exit_code_alone(code: int, kind: Kind, status: int) -> None:
    outcome = classify("job", code, None)
    assert (outcome.kind, outcome.exit_status) == (kind, status)
    assert bool(outcome.message) == (code != 0)


def test_failure_json_is_believed_before_the_code_that_a_launcher_left() -> None:
    failure = {"class": "DataError", "message": "a.jsonl:7: not JSON", "exit_status": 1, "step": 40}
    outcome = classify("job", 137, failure)
    assert (outcome.kind, outcome.exit_status) == (Kind.DATA, 1)
    assert (outcome.error, outcome.message, outcome.step) == (
        "DataError",
        "a.jsonl:7: not JSON",
        40,
    )


def test_a_failure_json_without_a_known_status_leaves_it_to_the_code() -> None:
    assert classify("job", 3, {"message": "?", "exit_status": 99}).kind is Kind.INFRASTRUCTURE
    assert classify("job", 1, {"exit_status": 0}).kind is Kind.DATA


def test_only_infrastructure_may_succeed_later() -> None:
    again = {
        code for code in (0, 1, 2, 3, 70, 130, 143) if classify("j", code, None).may_succeed_later
    }
    assert again == {3}


def test_documents_of_a_run_folder(tmp_path: Path) -> None:
    assert read_failure(str(tmp_path)) is None
    (tmp_path / "failure.json").write_text('{"class": "Conf')
    assert read_failure(str(tmp_path)) is None
    (tmp_path / "outcome.json").write_text(json.dumps({"outcome": "noop"}))
    assert read_outcome(str(tmp_path)) == {"outcome": "noop"}


def test_the_error_says_what_and_where_and_can_be_stored() -> None:
    error = StageError(classify("pretrain", 3, {"message": "store is away", "step": 12}), "log.txt")
    assert str(error) == "pretrain: infrastructure at step 12: store is away"
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.exit_status, copy.log) == (3, "log.txt")
