"""What the end of a job means."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.backends.outcome import (
    Kind,
    Outcome,
    StageError,
    brief,
    classify,
    read_failure,
    read_outcome,
)


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
    assert str(error) == "pretrain: infrastructure after step 12: store is away"
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.exit_status, copy.log) == (3, "log.txt")


def test_the_error_in_the_lines_of_prefect_is_one_that_a_person_reads() -> None:
    words = "no room for activations;\n  the plan was 12.1 GB, " + "try this, or that, " * 60
    failed = classify("pretrain", 3, {"message": words, "step": 1200, "class": "HostMemoryError"})
    error = StageError(failed, "/runs/pretrain/log.txt", "not tried again")
    shown = repr(error)
    assert shown.startswith(
        "pretrain: out of memory after step 1,200: no room for activations; the plan was 12.1 GB, "
    )
    assert shown.endswith(" ... (not tried again)")
    assert len(shown) < 250
    assert words in str(error)  # which is what a flow ends with


def test_an_error_with_nothing_to_say_ends_with_its_kind() -> None:
    error = StageError(Outcome(name="merge", kind=Kind.UNKNOWN, exit_status=3))
    assert str(error) == repr(error) == "merge: unknown"


@given(st.text(), st.integers(20, 200))
def test_what_is_brief_is_one_line_and_short_and_short_words_stay(text: str, most: int) -> None:
    line = brief(text, most)
    assert len(line) <= most
    assert len(line.splitlines()) <= 1
    assert brief(line, most) == line
    if len(words := " ".join(text.split())) <= most:
        assert line == words
