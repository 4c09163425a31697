"""Keys: the same for the same submission, and for no other."""

from __future__ import annotations

import pytest

from flows.backends.run_folder import job_key, submission_of
from flows.backends.spec import KEY

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
