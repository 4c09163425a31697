"""The Kubernetes block on a stand-in for a cluster: created, followed, stopped, ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from flows.backends.kubernetes.job import KubernetesJob
from flows.backends.kubernetes.manifests import MANIFESTS
from flows.backends.outcome import Kind, Outcome
from flows.backends.run_folder import SUBMITTED
from flows.backends.spec import Resources, Shares
from tests.yard.kubernetes.fake_kube import FakeKube
from tests.yard.kubernetes.fake_kube_pods import CGROUPS
from tests.yard.kubernetes.kube import (
    ALL_REDUCE,
    TWO_NODES,
    follow,
    job,
    log_of,
    saves,
    says,
    site,
    training,
    wait_until,
    when,
)

pytestmark = [pytest.mark.yard, pytest.mark.timeout(120)]

# --- to their end -------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "kind"), [(0, Kind.DONE), (70, Kind.DEFECT)])
def test_exit_status_comes_back(fake: FakeKube, tmp_path: Path, status: int, kind: Kind) -> None:
    block = job(fake, tmp_path, f"st-{status}", f"print('here'); raise SystemExit({status})")
    outcome = follow(block)
    assert (outcome.kind, outcome.exit_status) == (kind, status)
    assert log_of(block).read_text() == "here\n"


def test_ranks_on_two_nodes_meet_by_service_names(fake: FakeKube, tmp_path: Path) -> None:
    block = job(fake, tmp_path, "ranks-1", ALL_REDUCE, **TWO_NODES)
    assert follow(block).kind is Kind.DONE, log_of(block).read_text()
    log = log_of(block).read_text()
    assert "0: rank 0 on job-ranks-1-0: 3.0" in log
    assert "1: rank 1 on job-ranks-1-1: 3.0" in log


def test_done_jobs_are_removed_and_failed_jobs_stay(fake: FakeKube, tmp_path: Path) -> None:
    two = {"resources": Resources(nodes=2), "rank_launcher": ("true",)}
    follow(job(fake, tmp_path, "gone-1", "pass", **two))
    follow(job(fake, tmp_path, "stays-1", "raise SystemExit(2)"))
    kinds = ("jobs", "pods", "services")

    def left() -> list[str]:
        names = [one["metadata"]["name"] for kind in kinds for one in fake.all(kind)]
        return [name for name in names if "gone-1" in name]

    wait_until(lambda: not left())
    assert "job-stays-1" in [one["metadata"]["name"] for one in fake.all("jobs")]


@pytest.mark.full
def test_only_a_failed_share_is_run_again(fake: FakeKube, tmp_path: Path) -> None:
    code = "import sys; print('share', sys.argv[-1]); sys.exit(3 * (sys.argv[-1] == '1'))"
    block = job(fake, tmp_path, "shares-1", code, shares=Shares(count=3, at_once=2))
    outcome = follow(block)
    assert (outcome.kind, outcome.failed_shares) == (Kind.INFRASTRUCTURE, (1,))
    assert (tmp_path / "shares-1" / "log-00002.txt").read_text() == "share 2\n"
    again = Shares(count=3, only=outcome.failed_shares)
    block = job(fake, tmp_path, "shares-2", "import sys; print(sys.argv[1:])", shares=again)
    assert follow(block).kind is Kind.DONE
    log = (tmp_path / "shares-2" / "log-00001.txt").read_text()
    assert log == "['--world-size', '3', '--rank', '1']\n"


ONE_SHARE = """
import os, pathlib, sys, time
share, folder = int(sys.argv[-1]), pathlib.Path(os.environ["TRAINYARD_RUN_DIR"])
folder.mkdir(exist_ok=True)
(folder / "began").touch()
time.sleep(0.6)
(folder / "ended").touch()
sys.exit(2 * (share == 7))
"""


def test_rerun_shares_are_one_job_within_the_limit(fake: FakeKube, tmp_path: Path) -> None:
    shares = Shares(count=9, only=(7, 2, 5, 8), at_once=2)
    outcome = follow(job(fake, tmp_path, "shares-3", ONE_SHARE, shares=shares))
    assert (outcome.kind, outcome.failed_shares) == (Kind.CONFIG, (7,))
    folders = [tmp_path / "shares-3" / f"share-{share}" for share in (2, 5, 7, 8)]
    spans = [[(one / name).stat().st_mtime for name in ("began", "ended")] for one in folders]
    at_once = [sum(began <= at < ended for began, ended in spans) for at, _ in spans]
    assert max(at_once) == 2
    posted = [path for verb, path in fake.asked if verb == "POST"]
    assert len(posted) == 1


@pytest.mark.full
def test_the_time_limit_of_shares_is_that_of_each_one(fake: FakeKube, tmp_path: Path) -> None:
    """Four one after another take longer than the limit; the third, alone, does too."""
    code = "import sys, time; time.sleep(60 if sys.argv[-1] == '2' else 0.7)"
    shares, limit = Shares(count=4, at_once=1), Resources(time_limit_seconds=2)
    block = job(fake, tmp_path, "shares-4", code, shares=shares, resources=limit, grace_seconds=1.0)
    outcome = follow(block)
    assert (outcome.kind, outcome.failed_shares) == (Kind.TIME_LIMIT, (2,))


@pytest.mark.full
def test_where_jobsets_are_installed_ranks_run_in_one(fake: FakeKube, tmp_path: Path) -> None:
    fake.has_jobsets = True
    block = job(fake, tmp_path, "set-1", ALL_REDUCE, **TWO_NODES)
    assert follow(block).kind is Kind.DONE, log_of(block).read_text()
    kinds = [
        one["kind"] for one in yaml.safe_load_all((tmp_path / "set-1" / MANIFESTS).read_text())
    ]
    assert kinds == ["JobSet"]


WRONG = """
import json, os, sys
report = {"class": "ConfigError", "exit_status": 2, "message": "no such size", "step": None}
json.dump(report, open(os.environ["TRAINYARD_RUN_DIR"] + "/failure.json", "w"))
sys.exit(2)
"""


@pytest.mark.full
def test_the_message_of_a_wrong_option_in_a_jobset_reaches_the_outcome(
    fake: FakeKube, tmp_path: Path
) -> None:
    fake.has_jobsets = True
    options = site(fake, tmp_path, variant="jobset")
    outcome = follow(job(fake, tmp_path, "set-2", WRONG, options=options, **TWO_NODES))
    assert (outcome.kind, outcome.message) == (Kind.CONFIG, "no such size")


@pytest.mark.full
def test_a_preempted_jobset_is_reported_as_such(fake: FakeKube, tmp_path: Path) -> None:
    fake.has_jobsets = True
    block = job(fake, tmp_path, "set-3", training(), **TWO_NODES)
    outcome = follow(block, when(says(block, "step 3", 2), lambda: fake.preempt(1)))
    assert (outcome.kind, outcome.is_retryable) == (Kind.PREEMPTED, True)
    assert saves(block) == 2


@pytest.mark.full
def test_a_jobset_out_of_time_is_reported_as_such(fake: FakeKube, tmp_path: Path) -> None:
    fake.has_jobsets = True
    limit = Resources(nodes=2, time_limit_seconds=6)
    values = {**TWO_NODES, "resources": limit}
    outcome = follow(job(fake, tmp_path, "set-4", training(), **values))
    assert outcome.kind is Kind.TIME_LIMIT


def test_cancelled_jobset_lets_every_rank_save(fake: FakeKube, tmp_path: Path) -> None:
    fake.has_jobsets = True
    block = job(fake, tmp_path, "set-5", training(), **TWO_NODES)
    outcome = cancel(block, says(block, "step 2", 2))
    assert (outcome.kind, saves(block)) == (Kind.STOPPED, 2)
    for kind in ("jobsets", "jobs", "pods"):
        assert not [one for one in fake.all(kind) if "set-5" in one["metadata"]["name"]]


# --- ended by others ----------------------------------------------------------------------------


def test_a_preempted_node_ends_the_job(fake: FakeKube, tmp_path: Path) -> None:
    block = job(fake, tmp_path, "preempt-1", training(), **TWO_NODES)
    outcome = follow(block, when(says(block, "step 3", 2), lambda: fake.preempt(1)))
    assert (outcome.kind, outcome.is_retryable) == (Kind.PREEMPTED, True)
    assert "PreemptionByScheduler" in outcome.message
    assert saves(block) == 2


@pytest.mark.full
def test_a_single_preempted_pod_is_replaced_by_the_cluster(fake: FakeKube, tmp_path: Path) -> None:
    block = job(fake, tmp_path, "preempt-2", training(30))
    outcome = follow(block, when(says(block, "step 3"), lambda: fake.preempt(0)))
    assert outcome.kind is Kind.DONE
    assert log_of(block).read_text().count("step 0\n") == 2


FAILS_WHEN_REPLACED = """
import json, os, pathlib, sys, time
run = pathlib.Path(os.environ["TRAINYARD_RUN_DIR"])
if (run / "begun").exists():
    sys.exit(70)
(run / "begun").touch()
print("began", flush=True)
report = {"class": "Stopped", "exit_status": 143, "message": "told to stop"}
(run / "failure.json").write_text(json.dumps(report))
time.sleep(60)
"""


def test_failure_after_a_preempted_pod_counts(fake: FakeKube, tmp_path: Path) -> None:
    block = job(fake, tmp_path, "preempt-3", FAILS_WHEN_REPLACED, grace_seconds=1.0)
    outcome = follow(block, when(says(block, "began"), lambda: fake.preempt(0)))
    assert (outcome.kind, outcome.exit_status) == (Kind.DEFECT, 70)


@pytest.mark.full
def test_a_lost_node_is_distinguished_from_preemption(fake: FakeKube, tmp_path: Path) -> None:
    block = job(fake, tmp_path, "lost-1", training(), **TWO_NODES)
    outcome = follow(block, when(says(block, "step 3", 2), lambda: fake.lose_node_of(1)))
    assert outcome.kind is Kind.NODE_FAILURE, outcome


def test_a_job_out_of_memory_is_reported_as_such(fake: FakeKube, tmp_path: Path) -> None:
    if not (CGROUPS / "memory.limit_in_bytes").exists():
        pytest.skip("no memory cgroup of version 1 here")
    small = Resources(memory_bytes_per_node=64 * 2**20)
    block = job(fake, tmp_path, "memory-1", "x = bytearray(10**9); print(len(x))", resources=small)
    outcome = follow(block)
    assert (outcome.kind, "OOMKilled" in outcome.message) == (Kind.OUT_OF_MEMORY, True)


@pytest.mark.full
def test_a_job_out_of_time_is_reported_as_such(fake: FakeKube, tmp_path: Path) -> None:
    block = job(fake, tmp_path, "time-1", training(), resources=Resources(time_limit_seconds=2))
    outcome = follow(block)
    assert (outcome.kind, outcome.exit_status) == (Kind.TIME_LIMIT, 3)
    assert saves(block) == 1


def test_a_job_that_a_person_deletes_is_not_retried(fake: FakeKube, tmp_path: Path) -> None:
    block = job(fake, tmp_path, "deleted-1", training())
    outcome = follow(block, when(says(block, "step 2"), fake.delete_job))
    assert (outcome.kind, outcome.is_retryable) == (Kind.STOPPED, False)


def test_a_silent_job_is_stopped(fake: FakeKube, tmp_path: Path) -> None:
    code = "import time; print('last words', flush=True); time.sleep(600)"
    block = job(fake, tmp_path, "hang-1", code, hang_seconds=2.0, grace_seconds=1.0)
    outcome = follow(block)
    assert (outcome.kind, outcome.is_retryable) == (Kind.HANG, True)
    assert not [one for one in fake.all("jobs") if "hang-1" in one["metadata"]["name"]]


@pytest.mark.full
def test_a_heartbeat_is_a_sign_of_life(fake: FakeKube, tmp_path: Path) -> None:
    code = (
        "import os, pathlib, time\n"
        "for _ in range(30):\n"
        "    pathlib.Path(os.environ['TRAINYARD_RUN_DIR'], 'heartbeat').touch(); time.sleep(0.1)"
    )
    block = job(fake, tmp_path, "beat-1", code, hang_seconds=1.5)
    assert follow(block).kind is Kind.DONE


# --- stopped ------------------------------------------------------------------------------------


def cancel(block: KubernetesJob, ready: Callable[[], bool]) -> Outcome:
    """Cancel the waiting when the job is ready."""

    async def whole() -> Outcome:
        run = await block.trigger()
        waiting = asyncio.create_task(run.wait_for_completion())
        await asyncio.to_thread(wait_until, ready)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return await run.fetch_result()

    return asyncio.run(whole())


def test_cancelling_lets_every_rank_save_and_leaves_nothing(fake: FakeKube, tmp_path: Path) -> None:
    block = job(fake, tmp_path, "cancel-1", training(), **TWO_NODES)
    began = time.monotonic()
    outcome = cancel(block, says(block, "step 2", 2))
    assert outcome.kind is Kind.STOPPED
    assert saves(block) == 2
    for kind in ("jobs", "pods", "services"):
        assert not [one for one in fake.all(kind) if "cancel-1" in one["metadata"]["name"]]
    assert time.monotonic() - began < 30


def test_a_job_that_waits_for_room_is_cancelled(fake: FakeKube, tmp_path: Path) -> None:
    options = site(fake, tmp_path, node_selector={"disk": "none"})
    block = job(fake, tmp_path, "cancel-2", "pass", options=options)
    ready = Path(block.spec.run_directory, SUBMITTED).exists
    assert cancel(block, ready).kind is Kind.STOPPED
    assert not [one for one in fake.all("jobs") if "cancel-2" in one["metadata"]["name"]]


def test_credentials_are_in_pods_and_not_in_what_is_kept(fake: FakeKube, tmp_path: Path) -> None:
    fake.cluster.secrets["store-keys"] = {"AWS_SECRET_ACCESS_KEY": "hidden"}
    options = site(fake, tmp_path, secret_environment=("store-keys",))
    code = "import os; print(len(os.environ['AWS_SECRET_ACCESS_KEY']))"
    block = job(fake, tmp_path, "secret-1", code, options=options)
    assert follow(block).kind is Kind.DONE
    assert log_of(block).read_text() == "6\n"
    assert "hidden" not in (tmp_path / "secret-1" / MANIFESTS).read_text()


def test_result_of_a_running_job_is_refused(fake: FakeKube, tmp_path: Path) -> None:
    async def ask() -> None:
        run = await job(fake, tmp_path, "early-1", "pass").trigger()
        with pytest.raises(ValueError, match="call wait_for_completion"):
            await run.fetch_result()
        await run.stop()
        await run.wait_for_completion()

    asyncio.run(ask())
