"""Jobs over threads and processes: all done, one error raised, no hang if a worker dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.memory_group import little_memory
from trainyard.artifacts import retry
from trainyard.corpus.workers import Crew, check_stop, run_jobs
from trainyard.errors import DataError, InfrastructureError
from trainyard.machine import available_cores

MODULE = "tests.trainyard.corpus.test_workers"
CREWS = [Crew(0, 1), Crew(0, 3), Crew(2, 1), Crew(2, 2)]


def job(i: int) -> tuple[int, str]:
    """Square; fail on 7 and 9 (9 at once, 7 later), strangely on 11; die on 13; run on for 17; take
    a lot of memory on 19."""
    if i == 7:
        time.sleep(0.3)
    if i in (7, 9):
        raise DataError(f"job {i}")
    if i == 11:
        raise StrangeError(1, 2)
    if i == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    if i == 19:
        # The kernel is to kill this process alone. While a killed one gives its memory back, it may
        # choose another that asks for some: the others have started by now.
        time.sleep(1)
        Path("/proc/self/oom_score_adj").write_text("1000")
        bytearray(b"x" * (400 << 20))
    while i == 17:
        time.sleep(0.01)
        check_stop()
    return i * i, os.environ.get("TRAINYARD_TEST_JOB", "")


def workers_left() -> list[str]:
    """Children of this process that are not ranks of other tests, which stay."""
    children = multiprocessing.active_children()
    return [child.name for child in children if not child.name.startswith("trainyard rank")]


class StrangeError(Exception):
    """One that does not survive a pipe."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class Poison:
    """A function that cannot be read where it is sent to: the worker dies as it starts."""

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return os._exit, (5,)

    def __call__(self, job: int) -> int:
        return job


@pytest.mark.slow
@pytest.mark.parametrize("crew", CREWS)
def test_every_job_is_done_by_any_crew(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINYARD_TEST_JOB", raising=False)
    jobs = [*range(7), *range(20, 60)]
    results = dict(run_jobs(job, jobs, crew, {"TRAINYARD_TEST_JOB": "set"}))
    assert results == {i: (i * i, "set") for i in jobs}
    assert workers_left() == []
    assert dict(run_jobs(job, [], crew, {})) == {}


@pytest.mark.slow
@pytest.mark.parametrize("crew", CREWS)
def test_the_first_error_in_order_is_raised_and_no_worker_remains(crew: Crew) -> None:
    with pytest.raises(DataError, match="job 7"):
        dict(run_jobs(job, [1, 2, 7, 3, 9, 17, *range(20, 60)], crew, {}))
    assert workers_left() == []
    assert not [t for t in threading.enumerate() if t.name.startswith("worker-")]


@pytest.mark.slow
def test_any_error_comes_through() -> None:
    with pytest.raises(RuntimeError, match=r"StrangeError: 1 and 2 \(test_workers.py:"):
        dict(run_jobs(job, [1, 11], Crew(2, 1), {}))


@pytest.mark.slow
def test_stopping_early_leaves_no_worker() -> None:
    for crew in (Crew(0, 2), Crew(2, 1)):
        began = time.monotonic()
        running = run_jobs(job, [1, 17, 17, 2], crew, {})
        assert next(running)[0] == 1
        running.close()
        assert time.monotonic() - began < 8
        assert workers_left() == []


def patience_of(_: int) -> tuple[bool, frozenset[str]]:
    return retry.state_for_child()


@pytest.mark.slow
@pytest.mark.parametrize("crew", [Crew(1, 2), Crew(2, 1)])
def test_workers_wait_for_the_stores_that_their_parent_waits_for(crew: Crew) -> None:
    retry.answered("http://store")
    assert not any(waits for _, (waits, _) in run_jobs(patience_of, [0, 1], crew, {}))
    with retry.waiting():
        for _, (waits, stores) in run_jobs(patience_of, [0, 1], crew, {}):
            assert waits
            assert "http://store" in stores


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_with_a_message() -> None:
    began = time.monotonic()
    with pytest.raises(InfrastructureError, match="a worker process was killed by SIGKILL"):
        dict(run_jobs(job, [1, 13, 2, 3], Crew(2, 2), {}))
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_a_worker_killed_for_memory_is_reported_as_such() -> None:
    with little_memory() as bounded:
        done = subprocess.run(
            [*bounded, sys.executable, "-m", MODULE], capture_output=True, text=True, timeout=60
        )
    words = "HostMemoryError: a worker process was killed by SIGKILL, by the kernel"
    assert words in done.stdout, done.stderr


@pytest.mark.slow
def test_a_worker_that_dies_at_its_start_ends_the_run_with_a_message() -> None:
    with pytest.raises(InfrastructureError, match="died with exit status 5, perhaps while it st"):
        dict(run_jobs(Poison(), [1, 2, 3], Crew(2, 1), {}))
    assert workers_left() == []


def test_crews() -> None:
    assert Crew.of(1, side_by_side=False) == Crew.of(1, side_by_side=True) == Crew(0, 1)
    assert Crew.of(2, side_by_side=True) == Crew(0, 2)
    assert Crew.of(2, side_by_side=False) == Crew(2, 1)
    assert Crew.of(7, side_by_side=True) == Crew(4, 2)
    assert Crew.of(3, side_by_side=False, waiting=2) == Crew(3, 2)


# --- cores ------------------------------------------------------------------------------------


def test_the_least_quota_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    groups, member = tmp_path / "cgroup", tmp_path / "member"
    inner = groups / "pods/one"
    inner.mkdir(parents=True)
    member.write_text("0::/pods/one\n")
    assert available_cores(groups, member) == 8
    (inner / "cpu.max").write_text("max 100000\n")
    assert available_cores(groups, member) == 8
    (groups / "pods/cpu.max").write_text("250000 100000\n")
    assert available_cores(groups, member) == 3
    (inner / "cpu.max").write_text("50000 100000\n")
    assert available_cores(groups, member) == 1
    old = tmp_path / "v1"
    (old / "cpu/job").mkdir(parents=True)
    member.write_text("4:memory:/job\n1:cpu,cpuacct:/job\n")
    (old / "cpu/job/cpu.cfs_quota_us").write_text("400000\n")
    (old / "cpu/job/cpu.cfs_period_us").write_text("100000\n")
    assert available_cores(old, member) == 4
    assert available_cores(tmp_path / "none", tmp_path / "none") == 8


# --- a killed parent --------------------------------------------------------------------------

PARENT = """
import os, sys, time
from trainyard.corpus.workers import Crew, run_jobs

if __name__ == "__main__":
    for _ in run_jobs(time.sleep, [600, 600], Crew(2, 1), {}):
        pass
"""


@pytest.mark.slow
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


if __name__ == "__main__":
    try:
        dict(run_jobs(job, [1, 2, 19], Crew(2, 1), {}))
    except InfrastructureError as error:
        print(f"{type(error).__name__}: {error}")
