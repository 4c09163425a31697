"""Jobs over processes: all done, one fault told, no hang whatever a worker dies of."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from trainyard.corpus.workers import run_jobs
from trainyard.errors import DataError, InfrastructureError


def job(i: int) -> tuple[int, str]:
    """Square; fail on 7 and 9 (9 at once, 7 later); die on 13."""
    if i == 7:
        time.sleep(0.3)
    if i in (7, 9):
        raise DataError(f"job {i}")
    if i == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    return i * i, os.environ.get("TRAINYARD_TEST_JOB", "")


def test_every_job_is_done_by_any_number_of_workers() -> None:
    expected = {i: i * i for i in range(7)}
    assert {i: r for i, (r, _) in run_jobs(job, range(7), 1, {})} == expected
    results = dict(run_jobs(job, range(7), 3, {"TRAINYARD_TEST_JOB": "told"}))
    assert {i: r for i, (r, _) in results.items()} == expected
    assert {told for _, told in results.values()} == {"told"}


def test_the_first_fault_in_order_is_told_and_nobody_is_left() -> None:
    jobs = [1, 2, 7, 3, 9, *range(20, 60)]
    for workers in (1, 3):
        with pytest.raises(DataError, match="job 7"):
            dict(run_jobs(job, jobs, workers, {}))
    assert multiprocessing.active_children() == []


def test_a_worker_that_is_killed_ends_the_run_in_words() -> None:
    began = time.monotonic()
    with pytest.raises(InfrastructureError, match="a worker process died"):
        dict(run_jobs(job, [1, 13, 2, 3], 2, {}))
    assert time.monotonic() - began < 30


PARENT = """
import os, sys, time
from trainyard.corpus.workers import run_jobs

if __name__ == "__main__":
    for _, pid in run_jobs(os.getpgid, [0, 0], 2, {}):
        pass
    for _ in run_jobs(time.sleep, [600, 600], 2, {}):
        pass
"""


def test_workers_do_not_outlive_a_killed_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], start_new_session=True)
    try:
        deadline = time.monotonic() + 30
        seen: set[int] = set()
        while len(seen) < 4 and time.monotonic() < deadline:
            seen.update(_group(parent.pid))  # the parent, its resource tracker, two workers
            time.sleep(0.1)
        assert len(seen) >= 4
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(10)
        while _group(parent.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert _group(parent.pid) == []
    finally:
        for pid in _group(parent.pid):
            os.kill(pid, signal.SIGKILL)


def _group(pgid: int) -> list[int]:
    listed = subprocess.run(["ps", "-e", "-o", "pid=,pgid=,stat="], capture_output=True, text=True)
    rows = [line.split() for line in listed.stdout.splitlines()]
    return [int(pid) for pid, group, state in rows if int(group) == pgid and state[0] != "Z"]
