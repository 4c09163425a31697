"""The command that a user with a cluster is given (docs/kubernetes.md), on the stand-in for one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.yard.kubernetes.fake_kube import FakeKube
from tests.yard.kubernetes.kube import profile_on_pods
from tests.yard.yard import ROOT

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


def test_command_passes(fake: FakeKube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.has_jobsets = True
    profile = tmp_path / "mysite.toml"
    profile.write_text(profile_on_pods(fake, tmp_path))
    bin_folder = os.path.dirname(sys.executable)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")  # pods are processes of ours
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "kubernetes"]
    variables = {**os.environ, "TRAINYARD_KUBERNETES": str(profile)}
    done = subprocess.run(
        [*command, "tests/yard/kubernetes/test_real_cluster.py"],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout
    kinds = [path.rpartition("/")[2] for verb, path in fake.asked if verb == "POST"]
    assert {"jobs", "jobsets", "services"} <= set(kinds)
