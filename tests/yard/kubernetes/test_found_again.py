"""The Kubernetes block whose flow was killed: the job is found again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flows.backends.kubernetes.ends import END
from flows.backends.kubernetes.job import KubernetesJob
from flows.backends.outcome import Kind
from flows.backends.run_folder import SUBMITTED, StopRecord, write_stop_record
from flows.backends.spec import Resources
from tests.yard.kubernetes.fake_kube import FakeKube
from tests.yard.kubernetes.kube import follow, job, log_of, says, site, training, wait_until
from tests.yard.yard import ROOT
from trainyard.errors import ConfigError

pytestmark = [pytest.mark.yard, pytest.mark.timeout(120)]

# --- found again --------------------------------------------------------------------------------

SUBMITTER = """
import asyncio, json, sys
from flows.backends.kubernetes.options import Claim, KubernetesOptions
from flows.backends.spec import LaunchSpec
from flows.backends.kubernetes.job import KubernetesJob

async def main():
    given, kubeconfig, folder = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
    spec = LaunchSpec(**given | {"command": tuple(given["command"])})
    claims = (Claim(name="yard", target=folder),)
    options = KubernetesOptions(namespace="yard", kubeconfig=kubeconfig, claims=claims)
    await (await KubernetesJob(spec=spec, options=options).trigger()).wait_for_completion()

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "is_noted",
    [
        pytest.param(False, id="killed before it was noted"),
        pytest.param(True, id="noted", marks=pytest.mark.full),
    ],
)
def test_a_killed_flow_finds_its_job_again(fake: FakeKube, tmp_path: Path, is_noted: bool) -> None:
    key = f"again-{int(is_noted)}"
    block = job(fake, tmp_path, key, training(steps=60))
    names = ("name", "command", "run_directory", "key", "working_directory", "image")
    given = json.dumps({name: getattr(block.spec, name) for name in names})
    command = [sys.executable, "-c", SUBMITTER, given, str(fake.kubeconfig), str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as flow:
        wait_until(says(block, "step 3"))
        flow.send_signal(signal.SIGKILL)
    if not is_noted:
        Path(block.spec.run_directory, SUBMITTED).unlink()
    assert follow(block).kind is Kind.DONE
    posted = [path for method, path in fake.asked if method == "POST"]
    assert len(posted) == 1
    assert log_of(block).read_text() == "".join(f"step {number}\n" for number in range(60))


def test_an_end_that_a_killed_flow_began_is_finished(fake: FakeKube, tmp_path: Path) -> None:
    block = job(fake, tmp_path, "hung-1", training())
    Path(block.spec.run_directory).mkdir()
    write_stop_record(
        Path(block.spec.run_directory), StopRecord(kind=Kind.HANG, was_signalled=False)
    )
    assert follow(block).kind is Kind.HANG
    assert not [one for one in fake.all("jobs") if "hung-1" in one["metadata"]["name"]]


def test_a_finished_job_is_not_run_again(fake: FakeKube, tmp_path: Path) -> None:
    block = job(fake, tmp_path, "finished-1", "print('once')")
    assert follow(block).kind is Kind.DONE
    asked = len(fake.asked)
    assert follow(block).kind is Kind.DONE
    assert len(fake.asked) == asked
    (tmp_path / "finished-1" / END).unlink()
    wait_until(lambda: not [j for j in fake.all("jobs") if "finished-1" in j["metadata"]["name"]])
    forgotten = follow(block)
    assert (forgotten.kind, forgotten.is_retryable) == (Kind.UNKNOWN, False)
    assert log_of(block).read_text() == "once\n"


def test_a_job_older_than_jobsets_is_followed(fake: FakeKube, tmp_path: Path) -> None:
    two = {"resources": Resources(nodes=2), "rank_launcher": ("true",)}
    options = site(fake, tmp_path, delete_after_success=False)
    block = job(fake, tmp_path, "older-1", "pass", options=options, **two)
    assert follow(block).kind is Kind.DONE
    for note in (SUBMITTED, END):  # killed before either was written
        (tmp_path / "older-1" / note).unlink()
    fake.has_jobsets = True
    assert follow(block).kind is Kind.DONE
    posted = [path.rpartition("/")[2] for method, path in fake.asked if method == "POST"]
    assert sorted(posted) == ["jobs", "services", "services"]  # of these one was there


def test_a_run_folder_is_for_one_submission(fake: FakeKube, tmp_path: Path) -> None:
    first = job(fake, tmp_path, "one-1", "pass")
    follow(first)
    other = KubernetesJob(spec=replace(first.spec, key="one-2"), options=first.options)
    with pytest.raises(ConfigError, match="belongs to job job-one-1, not to job-one-2"):
        follow(other)
